"""Adapters' folders for the loaders of an engine process: the server's process, which has the stores, opens them.

So a store has one owner, and the engine's process knows neither Redis nor any key to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.core.blob_messages import BlobFolder, BlobMessage, CloseBlob, KeepBeside, OpenBlob
from lora_serve.core.messages import ReplyValue
from lora_serve.engine_host.blob_calls import BlobCalls

SCRATCH_PREFIX = "engine-"  # of folders that an engine which was killed leaves behind


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
