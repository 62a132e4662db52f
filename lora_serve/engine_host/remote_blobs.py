"""Adapters' folders for the loaders of an engine process: the server's process, which has the stores, opens them.

So a store has one owner, and the engine's process knows neither Redis nor any key to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.client.faults import error_of
from lora_serve.client.record import Record
from lora_serve.client.wire import BlobGiven, CloseBlob, ErrandDone, ErrandFailed, KeepBeside, OpenBlob

SCRATCH_PREFIX = "engine-"  # of folders that an engine which was killed leaves behind
Reply = BlobGiven | ErrandDone | ErrandFailed


class RemoteBlobs:
    """See `Blobs`. A loader's thread waits for the answer, which `answered` brings on another."""

    def __init__(self, send: Callable[[Record], None], scratch: Path) -> None:
        """`scratch`: a folder on the stores' file system, for files that are to be kept beside a blob."""
        self._send = send
        self._scratch = scratch
        self._waiting: dict[int, Future[Reply]] = {}
        self._numbers = itertools.count(1)

    @contextmanager
    def verified(self, digest: str) -> Iterator[VerifiedBlob]:
        """See Blobs."""
        with self._opened(digest, is_near=False) as blob:
            yield VerifiedBlob(Path(blob.folder), blob.tier, blob.fetch, blob.verify)

    @contextmanager
    def near(self, digest: str) -> Iterator[Path]:
        """See Blobs."""
        with self._opened(digest, is_near=True) as blob:
            yield Path(blob.folder)

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """See Blobs. The bytes do not cross: the file is written here and moved there."""
        with scratch_folder(self._scratch, SCRATCH_PREFIX) as folder:
            (folder / name).write_bytes(content)
            self._ask(lambda errand: KeepBeside(errand, digest, str(folder / name)))

    def answered(self, reply: Reply) -> None:
        """Called with every answer that comes."""
        waiting = self._waiting.pop(reply.errand, None)
        if waiting is not None:
            waiting.set_result(reply)

    @contextmanager
    def _opened(self, digest: str, *, is_near: bool) -> Iterator[BlobGiven]:
        reply = self._ask(lambda errand: OpenBlob(errand, digest, is_near))
        assert isinstance(reply, BlobGiven)
        try:
            yield reply
        finally:
            self._send(CloseBlob(reply.errand))

    def _ask(self, record: Callable[[int], Record]) -> Reply:
        """Raises what the errand failed with."""
        number, answer = next(self._numbers), Future[Reply]()
        self._waiting[number] = answer
        self._send(record(number))
        reply = answer.result()
        if isinstance(reply, ErrandFailed):
            raise error_of(reply.fault)
        return reply
