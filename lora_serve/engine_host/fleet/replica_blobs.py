"""Adapters' folders for the loaders of a replica: those of a gateway that sees the same files, else copies of its own,
whose content a gateway sends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from lora_serve.adapters.checkpoint.content import CONTENT_NAMES, adapter_digest, content_names
from lora_serve.adapters.regular_file import open_regular, views_of
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import scratch_folder, words_of
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.core.blob_messages import (
    PIECE_BYTES,
    BlobCall,
    BlobFiles,
    BlobFolder,
    CloseBlob,
    KeepBeside,
    OpenBlob,
    OpenStaged,
    Piece,
    ReadPiece,
    WritePiece,
)
from lora_serve.core.errors import AdapterUnavailableError, StoreUnwritableError
from lora_serve.core.messages import Convert, Converted, Reply, ReplyValue, Validate
from lora_serve.engine_host.fleet.gateways import Gateways
from lora_serve.engine_host.remote_blobs import BlobCalls

ANSWER_SECONDS = 30.0  # after which a gateway that does not answer is given up
_TRIES = 2  # of one gateway, for content that arrives damaged
_log = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaBlobs:
    """See `Blobs`, `StagedFolders`. `gateways` is set before anybody asks. Every gateway may leave at any time: then
    another is asked.
    """

    gateways: Gateways

    def __init__(self, cache: DiskStore, prefix: str) -> None:
        """`cache`: of copies. `prefix`: of the names of this replica's folders among a gateway's files."""
        self._cache = cache
        self._prefix = prefix
        self._calls = BlobCalls()

    def answered(self, reply: Reply) -> None:
        """See `BlobCalls.answered`."""
        self._calls.answered(reply)

    @contextmanager
    def verified(self, digest: str) -> Iterator[VerifiedBlob]:
        """See Blobs."""
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(self._cache.holding(digest))
            copy = self._cache.sound_copy(digest) if self._cache.has(digest) else None
            if copy is not None:
                yield VerifiedBlob(copy, "disk", 0.0, time.perf_counter() - started)
            else:
                yield self._of_any(lambda gateway: self._verified_at(gateway, digest), stack)

    @contextmanager
    def near(self, digest: str) -> Iterator[Path]:
        """See Blobs."""
        with ExitStack() as stack:
            if self._cache.has(digest):
                yield stack.enter_context(self._cache.open(digest))
            else:
                yield self._of_any(lambda gateway: self._near_at(gateway, digest), stack)[1].folder

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """See Blobs."""
        if self._cache.has(digest):
            self._cache.keep_beside(digest, name, content)
            return
        with ExitStack() as stack:
            gateway, blob = self._of_any(lambda gateway: self._near_at(gateway, digest), stack)
            folder = stack.enter_context(scratch_folder(blob.scratch, self._prefix))
            (folder / name).write_bytes(content)
            self._ask(gateway, KeepBeside(self._calls.new_id(), digest, folder / name))

    @contextmanager
    def opened(self, message: Convert | Validate) -> Iterator[Path]:
        """See StagedFolders."""
        if message.folder is not None:
            yield message.folder
            return
        gateway, of = self.gateways.caller(message.call_id)
        with ExitStack() as stack:
            with self._open(gateway, OpenStaged(self._calls.new_id(), of)) as (opened, files):
                assert isinstance(files, BlobFiles)
                copy = self._fetched(gateway, opened, files, stack)
            yield copy

    def changed(self, message: Convert, folder: Path) -> Converted | None:
        """See StagedFolders."""
        if message.folder is not None:
            return None
        gateway, of = self.gateways.caller(message.call_id)
        for name in content_names(folder):
            with open_regular(folder / name) as file:
                offset = 0
                for piece in views_of(file, PIECE_BYTES):
                    call = WritePiece(self._calls.new_id(), of, name, offset, bytes(piece))
                    self._ask(gateway, call)
                    offset += len(piece)
        return Converted(adapter_digest(folder))

    # ----------------------------------------------------------------------------------------------------------

    def _of_any(self, open_at: Callable[[str], AbstractContextManager[T]], stack: ExitStack) -> T:
        """What the first gateway gives that has it. Raises the last one's AdapterUnavailableError or OSError."""
        words = "No server is there that has the adapter's files; try again."
        error: AdapterUnavailableError | OSError = AdapterUnavailableError(words)
        for gateway in self.gateways.attached:
            try:
                return stack.enter_context(open_at(gateway))
            except (AdapterUnavailableError, OSError) as failed:
                error = failed
        raise error

    @contextmanager
    def _near_at(self, gateway: str, digest: str) -> Iterator[tuple[str, BlobFolder]]:
        with self._open(gateway, OpenBlob(self._calls.new_id(), digest, is_near=True)) as (_, blob):
            assert isinstance(blob, BlobFolder)
            yield gateway, blob

    @contextmanager
    def _verified_at(self, gateway: str, digest: str) -> Iterator[VerifiedBlob]:
        with ExitStack() as stack:
            with ExitStack() as opened:
                call = OpenBlob(self._calls.new_id(), digest, is_near=False)
                _, blob = opened.enter_context(self._open(gateway, call))
                if isinstance(blob, BlobFolder):
                    stack.push(opened.pop_all())
                    found = VerifiedBlob(blob.folder, blob.tier, blob.fetch, blob.verify)
                else:
                    assert isinstance(blob, BlobFiles)
                    started = time.perf_counter()
                    copy = self._fetched(gateway, call.call_id, blob, stack)
                    seconds = time.perf_counter() - started
                    kept = self._kept(digest, copy, seconds)
                    found = VerifiedBlob(kept or copy, blob.tier, blob.fetch + seconds, blob.verify)
            yield found

    @contextmanager
    def _open(self, gateway: str, call: OpenBlob | OpenStaged) -> Iterator[tuple[int, BlobFolder | BlobFiles]]:
        try:
            blob = self._ask(gateway, call)
            assert isinstance(blob, BlobFolder | BlobFiles)
            yield call.call_id, blob
        finally:  # also of one that is opened only after it was given up
            self.gateways.post(gateway, CloseBlob(call.call_id))

    def _fetched(self, gateway: str, opened: int, files: BlobFiles, stack: ExitStack) -> Path:
        """A copy of an opened folder, gone when `stack` is closed. Raises AdapterUnavailableError."""
        try:
            folder = stack.enter_context(scratch_folder(self._cache.tmp))
            for _ in range(_TRIES):
                for name in sorted(files.sizes.keys() & CONTENT_NAMES):
                    self._fetch_file(gateway, opened, folder / name, files.sizes[name])
                if adapter_digest(folder) == files.digest:
                    return folder
        except OSError as error:
            _log.warning("a server's adapter cannot be written here: %r", error)
            words = words_of(error)
            raise StoreUnwritableError(f"The engine cannot keep the adapter's files at present: {words}.") from None
        raise AdapterUnavailableError("The adapter was damaged on its way to the engine; try again.")

    def _fetch_file(self, gateway: str, opened: int, path: Path, size: int) -> None:
        with path.open("wb") as file:
            for offset in range(0, size, PIECE_BYTES):
                call = ReadPiece(self._calls.new_id(), opened, path.name, offset)
                piece = self._ask(gateway, call)
                assert isinstance(piece, Piece)
                file.write(piece.content)

    def _kept(self, digest: str, copy: Path, seconds: float) -> Path | None:
        """The copy in the cache; None if it has no room."""
        try:
            return self._cache.keep(digest, copy, seconds)
        except AdapterUnavailableError as error:
            _log.warning("%s is not kept on the engine's disk: %s", digest, error)
            return None

    def _ask(self, gateway: str, call: BlobCall) -> ReplyValue:
        return self._calls.ask(call, lambda: self.gateways.post(gateway, call), ANSWER_SECONDS)
