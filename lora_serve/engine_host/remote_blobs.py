"""Adapters' folders for the loaders of an engine process: the server's process, which has the stores, opens them.

So a store has one owner, and the engine's process knows neither Redis nor any key to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.core.blob_messages import BlobFolder, BlobMessage, CloseBlob, KeepBeside, OpenBlob
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.message import Call
from lora_serve.core.messages import Reply, ReplyValue

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


class RemoteBlobs:
    """See `Blobs`, `BlobCalls.answered`."""

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
        """See Blobs."""
        with self._opened(digest, is_near=False) as blob:
            yield VerifiedBlob(blob.folder, blob.tier, blob.fetch, blob.verify)

    @contextmanager
    def near(self, digest: str) -> Iterator[Path]:
        """See Blobs."""
        with self._opened(digest, is_near=True) as blob:
            yield blob.folder

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """See Blobs. The bytes do not cross: the file is written here and moved there."""
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
