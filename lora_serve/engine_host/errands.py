"""The server's part of `remote_blobs.py`: holds adapters' folders open for the loaders of an engine process.

A store that hangs is given up after a term, as loads are (`adapters/loading/loader.py`): the engine is told, and
another thread takes the place of the one that hangs.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar, cast

from lora_serve.adapters.loading.blobs import StoredBlobs
from lora_serve.adapters.loading.loader import LOAD_TIMEOUT
from lora_serve.adapters.loading.watchdog_pool import WatchdogPool
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.client.faults import fault_of
from lora_serve.client.record import Record
from lora_serve.client.wire import BlobGiven, CloseBlob, Errand, ErrandDone, ErrandFailed, KeepBeside, OpenBlob
from lora_serve.core.errors import AdapterUnavailableError, LoadHangsError, LoraServeError, contained
from lora_serve.engine_host.remote_blobs import SCRATCH_PREFIX

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0  # that `close` waits for the stores
T = TypeVar("T")
Send = Callable[[Record], None]


class Errands:
    """`run` and `drop` are called on the event loop's thread; the stores are spoken to on threads."""

    def __init__(self, blobs: StoredBlobs, num_threads: int, scratch: Path, term: float = LOAD_TIMEOUT) -> None:
        """`scratch`: where the engine makes its own folders, see `RemoteBlobs`. `term`: seconds, see `Loader`."""
        self._blobs = blobs
        self._scratch = scratch
        self._threads = WatchdogPool("errands", num_threads, term)
        self._open: dict[int, ExitStack] = {}  # of the engine that runs now
        self._life = 0  # errands of an earlier engine are nobody's
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, errand: Errand, send: Send) -> None:
        """Do it, and `send` what came of it."""
        task = asyncio.get_running_loop().create_task(self._run(errand, send, self._life))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop(self) -> None:
        """The engine has ended: let go of what it held, and remove what it was writing."""
        self._life += 1
        stacks, self._open = list(self._open.values()), {}
        for stack in stacks:
            self._begin(stack.close)
        for folder in self._scratch.glob(f"{SCRATCH_PREFIX}*"):
            self._begin(functools.partial(remove_folder, folder))

    async def close(self) -> None:
        """After the engine has ended."""
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.close, _CLOSE_SECONDS, drop=False)

    async def _run(self, errand: Errand, send: Send, life: int) -> None:
        if isinstance(errand, CloseBlob):
            stack = self._open.pop(errand.errand, None)
            if stack is not None and life == self._life:
                await asyncio.wrap_future(self._begin(stack.close))
            return
        try:
            send(await self._done(errand, life))
        except Exception as error:
            if not isinstance(error, LoraServeError | OSError):
                _log.exception("an errand of the engine failed")
            send(ErrandFailed(errand.errand, fault_of(error)))

    async def _done(self, errand: OpenBlob | KeepBeside, life: int) -> Record:
        if isinstance(errand, KeepBeside):
            disk, digest, path = self._blobs.disk, errand.digest, Path(errand.path)
            await asyncio.wrap_future(self._begin(lambda: disk.take_beside(digest, path)))
            return ErrandDone(errand.errand)
        stack = ExitStack()
        source = self._near(errand.digest) if errand.is_near else self._blobs.verified(errand.digest)
        blob = await asyncio.wrap_future(self._begin(lambda: stack.enter_context(source), stack.close))
        if life != self._life:
            self._begin(stack.close)
        else:
            self._open[errand.errand] = stack
        return BlobGiven(errand.errand, str(blob.folder), blob.tier, blob.fetch, blob.verify)

    def _begin(self, call: Callable[[], T], undo: Callable[[], None] = lambda: None) -> Future[T]:
        """On a thread. `undo`: of what comes when nobody waits for it any more."""
        future = Future[T]()

        def run() -> None:
            try:
                result = contained(call)
            except Exception as error:
                _settle(future, error=error)
                return
            if not _settle(future, result):
                contained(undo)

        def hangs() -> None:
            _settle(future, error=LoadHangsError("The adapter store does not answer at present; try again.", 10.0))

        try:
            self._threads.submit(run, hangs)
        except AdapterUnavailableError as error:
            future.set_exception(error)
        return future

    def _near(self, digest: str) -> AbstractContextManager[VerifiedBlob]:
        return _Near(self._blobs.near(digest))


def _settle(future: Future[T], result: T | None = None, error: Exception | None = None) -> bool:
    """Whether it was not settled, or given up, before."""
    try:
        if error is None:
            future.set_result(cast(T, result))
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


class _Near(AbstractContextManager[VerifiedBlob]):
    """A folder that was not looked at, in the form of one that was."""

    def __init__(self, opened: AbstractContextManager[Path]) -> None:
        self._opened = opened

    def __enter__(self) -> VerifiedBlob:
        return VerifiedBlob(self._opened.__enter__(), "disk", 0.0, 0.0)

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(None, None, None)
