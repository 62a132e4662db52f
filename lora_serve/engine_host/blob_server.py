"""The server's side of `remote_blobs.py`: holds adapters' folders open for the loaders of an engine process.

A store that hangs is given up after a time, as loads are (`adapters/loading/loader.py`): the engine is told, and
another thread takes the place of the one that hangs.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from lora_serve.adapters.loading.blobs import StoredBlobs
from lora_serve.adapters.loading.loader import LOAD_TIMEOUT
from lora_serve.adapters.loading.watchdog_pool import WatchdogPool
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.core.blob_messages import BlobCall, BlobFolder, BlobMessage, CloseBlob, KeepBeside, OpenBlob
from lora_serve.core.errors import AdapterUnavailableError, LoadHangsError, LoraServeError, contained
from lora_serve.core.messages import Reply, ReplyValue
from lora_serve.engine_host.remote_blobs import SCRATCH_PREFIX

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0  # that `close` waits for the stores
T = TypeVar("T")


class BlobServer:
    """Serves one engine at a time. `run` and `drop` are called on the event loop; the stores are called on threads."""

    def __init__(
        self,
        blobs: StoredBlobs,
        num_threads: int,
        scratch: Path,
        timeout: float = LOAD_TIMEOUT,
        prefix: str = SCRATCH_PREFIX,
    ) -> None:
        """`scratch`, `prefix`: where the engine makes its own folders, see `RemoteBlobs`. `timeout`: seconds, see
        `Loader`.
        """
        self._blobs = blobs
        self._scratch = scratch
        self._prefix = prefix
        self._threads = WatchdogPool("blobs", num_threads, timeout)
        self._open: dict[int, ExitStack] = {}  # by call id, of the engine that runs now, from when it asks
        self._life = 0  # nobody waits for an earlier engine's calls
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, message: BlobMessage, send: Callable[[Reply], None]) -> None:
        """Do what the message says, and `send` the answer if it is a call."""
        task = asyncio.get_running_loop().create_task(self._run(message, send, self._life))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop(self) -> None:
        """The engine has ended: close the folders that it held, and remove those that it was writing."""
        self._life += 1
        stacks, self._open = list(self._open.values()), {}
        for stack in stacks:
            self._begin(stack.close)
        for folder in self._scratch.glob(f"{self._prefix}*"):
            self._begin(functools.partial(remove_folder, folder))

    async def close(self) -> None:
        """End the threads, after the engine has ended."""
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.close, _CLOSE_SECONDS, drop=False)

    async def _run(self, message: BlobMessage, send: Callable[[Reply], None], life: int) -> None:
        if life != self._life:
            return
        if isinstance(message, CloseBlob):
            stack = self._open.pop(message.call_id, None)
            if stack is not None:
                await asyncio.wrap_future(self._begin(stack.close))
            return
        try:
            send(Reply(message.call_id, await self._answer(message)))
        except Exception as error:
            if not isinstance(error, LoraServeError | OSError):
                _log.exception("a blob could not be served to the engine")
            send(Reply(message.call_id, error=error))

    async def _answer(self, message: BlobCall) -> ReplyValue:
        if isinstance(message, OpenBlob):
            async with self._opening(message.call_id) as stack:
                return await self._opened(message, stack)
        assert isinstance(message, KeepBeside), "an engine that sees the folders asks for nothing else"
        keep = functools.partial(self._blobs.disk.take_beside, message.digest, message.path)
        await self._on_thread(keep)
        return None

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._begin(call))

    @asynccontextmanager
    async def _opening(self, call_id: int) -> AsyncIterator[ExitStack]:
        """A stack that is closed at CloseBlob; at the end of the block if that came meanwhile, or at an error."""
        stack = self._open[call_id] = ExitStack()
        try:
            yield stack
        except BaseException:
            if self._open.get(call_id) is stack:
                del self._open[call_id]
            raise
        finally:
            if self._open.get(call_id) is not stack:
                self._begin(stack.close)

    async def _opened(self, message: OpenBlob, stack: ExitStack) -> BlobFolder:
        def opened() -> BlobFolder:
            if message.is_near:
                near = stack.enter_context(self._blobs.near(message.digest))
                return BlobFolder(near, "disk", 0.0, 0.0, self._scratch)
            blob = stack.enter_context(self._blobs.verified(message.digest))
            return BlobFolder(blob.folder, blob.tier, blob.fetch, blob.verify, self._scratch)

        return await asyncio.wrap_future(self._begin(opened, stack.close))

    def _begin(self, call: Callable[[], T], undo: Callable[[], None] = lambda: None) -> Future[T]:
        """Start `call` on a thread. `undo`: called if its result comes when nobody waits for it any more."""
        future = Future[T]()

        def run() -> None:
            try:
                result = contained(call)
            except Exception as error:
                _fail(future, error)
                return
            try:
                future.set_result(result)
            except InvalidStateError:  # it was given up
                contained(undo)

        def hangs() -> None:
            _fail(future, LoadHangsError("The adapter store does not answer at present; try again.", 10.0))

        try:
            self._threads.submit(run, hangs)
        except AdapterUnavailableError as error:
            future.set_exception(error)
        return future


def _fail(future: Future[T], error: Exception) -> None:
    with suppress(InvalidStateError):  # it was given up, or has just ended
        future.set_exception(error)
