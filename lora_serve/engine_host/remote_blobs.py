"""Adapters' folders for the loaders of an engine process: the server's process, which has the stores, opens them.

So a store has one owner, and the engine's process knows neither Redis nor any key to it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from lora_serve.adapters.stores.blobs import Blobs, StoredBlobs
from lora_serve.adapters.stores.files import remove_folder, scratch_folder
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.core.blob_messages import BlobCall, BlobFolder, BlobMessage, CloseBlob, KeepBeside, OpenBlob
from lora_serve.core.errors import AdapterUnavailableError, LoadHangsError, LoraServeError, contained
from lora_serve.core.live import Call
from lora_serve.core.messages import Reply, ReplyValue
from lora_serve.engine.loader import LOAD_TIMEOUT
from lora_serve.engine.watchdog_pool import WatchdogPool

SCRATCH_PREFIX = "engine-"  # of folders that an engine which was killed leaves behind


class BlobCalls:
    """Calls from the loaders' threads to the server that has the stores: a thread waits for the answer, which
    `answered` brings on another.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Future[ReplyValue]] = {}
        self._call_ids = itertools.count(1)

    def new_id(self) -> int:
        return next(self._call_ids)

    def ask(self, call: Call, send: Callable[[], None], timeout: float | None = None) -> ReplyValue:
        """`send` the call and wait for its answer. Raises the error of a failed call, AdapterUnavailableError."""
        self._calls[call.call_id] = answer = Future[ReplyValue]()
        send()
        try:
            return answer.result(timeout)
        except TimeoutError:
            raise AdapterUnavailableError(
                "The server that has the adapter's files does not answer; try again."
            ) from None
        finally:
            self._calls.pop(call.call_id, None)

    def answered(self, reply: Reply) -> None:
        """Hand a reply to the thread that waits for it, if one still does."""
        call = self._calls.pop(reply.call_id, None)
        if call is None:
            return
        if reply.error is None:
            call.set_result(reply.value)
        else:
            call.set_exception(reply.error)


class RemoteBlobs(Blobs):
    """The stores of the server's process, for an engine on the same machine."""

    def __init__(
        self, send: Callable[[Sequence[BlobMessage]], None], scratch: Path, prefix: str = SCRATCH_PREFIX
    ) -> None:
        """`scratch`: a folder on the stores' file system, for files that are to be kept beside a blob; names of what is
        written there begin with `prefix`.
        """
        self._send = send
        self._scratch = scratch
        self._prefix = prefix
        self._calls = BlobCalls()
        self.answered = self._calls.answered

    @contextmanager
    def verified(self, digest: str) -> Iterator[VerifiedBlob]:
        with self._opened(digest, is_near=False) as blob:
            yield VerifiedBlob(blob.folder, blob.tier, blob.fetch, blob.verify)

    @contextmanager
    def near(self, digest: str) -> Iterator[Path]:
        with self._opened(digest, is_near=True) as blob:
            yield blob.folder

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """The bytes do not cross: the file is written here and moved there."""
        with scratch_folder(self._scratch, self._prefix) as folder:
            (folder / name).write_bytes(content)
            self._call(KeepBeside(self._calls.new_id(), digest, folder / name))

    @contextmanager
    def _opened(self, digest: str, *, is_near: bool) -> Iterator[BlobFolder]:
        call = OpenBlob(self._calls.new_id(), digest, is_near)
        blob = self._call(call)
        assert isinstance(blob, BlobFolder)
        try:
            yield blob
        finally:
            self._send([CloseBlob(call.call_id)])

    def _call(self, call: OpenBlob | KeepBeside) -> ReplyValue:
        return self._calls.ask(call, lambda: self._send([call]))


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
        self._life = 0  # an earlier engine's calls are dropped
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
        """Start `call` on a thread. `undo`: called if its result comes after it was given up."""
        future = Future[T]()

        def run() -> None:
            try:
                with contained():
                    result = call()
            except Exception as error:
                _fail(future, error)
                return
            try:
                future.set_result(result)
            except InvalidStateError:  # it was given up
                with contained():
                    undo()

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
