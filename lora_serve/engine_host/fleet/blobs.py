"""Adapters' folders for a fleet's replicas: the server's stores, opened for whichever replica asks; and the replica's
end, whose loaders read folders of a gateway that sees the same files, else copies of their own, whose content a gateway
sends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lora_serve.adapters.checkpoint.content import CONTENT_NAMES, adapter_digest, content_names
from lora_serve.adapters.regular_file import open_regular, views_of
from lora_serve.adapters.stores.blobs import Blobs, StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import scratch_folder, words_of
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.client.ray.link import ReplicaLink
from lora_serve.core.blob_messages import (
    PIECE_BYTES,
    BlobCall,
    BlobFiles,
    BlobFolder,
    BlobMessage,
    CloseBlob,
    FilePiece,
    KeepBeside,
    OpenBlob,
    OpenStaged,
    ReadPiece,
    WritePiece,
)
from lora_serve.core.errors import AdapterUnavailableError, StoreUnwritableError
from lora_serve.core.messages import Convert, Converted, FromEngine, ReplyValue, Validate
from lora_serve.engine_host.fleet.gateways import Gateways
from lora_serve.engine_host.remote_blobs import BlobCalls, BlobServer
from lora_serve.engine_host.service import StagedFolders

_NOWHERE = AdapterUnavailableError("The adapter's files are elsewhere.")
ANSWER_SECONDS = 30.0  # after which a gateway that does not answer is given up
_TRIES = 2  # of one gateway, for content that arrives damaged
_log = logging.getLogger(__name__)
T = TypeVar("T")


class ContentServer(BlobServer):
    """See BlobServer. A replica reads what it has opened, and the folders of calls that it works on."""

    def __init__(self, *arguments: Any, staged: Mapping[int, Convert | Validate], **more: Any) -> None:
        """`staged`: by call id, what the replica was asked to convert or to validate."""
        super().__init__(*arguments, **more)
        self._staged = staged
        self._folders: dict[int, tuple[Path, frozenset[str]]] = {}  # with their files, by the call that opened them

    async def _answer(self, message: BlobCall) -> ReplyValue:
        if isinstance(message, OpenStaged):
            folder = self._staged_folder(message.of)
            async with self._opening(message.call_id) as stack:
                return await self._files(message.call_id, stack, folder, None, ("", 0.0, 0.0))
        if isinstance(message, OpenBlob) and not message.is_near:
            async with self._opening(message.call_id) as stack:
                blob = await self._opened(message, stack)
                figures = blob.tier, blob.fetch, blob.verify
                return await self._files(message.call_id, stack, blob.folder, message.digest, figures)
        if isinstance(message, ReadPiece):
            folder, names = self._folders.get(message.opened, (Path(), frozenset[str]()))
            if message.name not in names:
                raise _NOWHERE
            return FilePiece(await self._on_thread(lambda: _read(folder / message.name, message.offset)))
        if isinstance(message, WritePiece):
            if not isinstance(self._staged.get(message.of), Convert) or message.name not in CONTENT_NAMES:
                raise _NOWHERE
            folder = self._staged_folder(message.of)
            await self._on_thread(lambda: _write(folder / message.name, message.offset, message.content))
            return None
        raise _NOWHERE

    async def _files(
        self, call_id: int, stack: ExitStack, folder: Path, digest: str | None, figures: tuple[str, float, float]
    ) -> BlobFiles:
        """What an opened folder holds. `digest` None: it is computed."""

        def look() -> tuple[dict[str, int], str]:
            sizes = {name: (folder / name).stat().st_size for name in content_names(folder)}
            return sizes, digest or adapter_digest(folder)

        sizes, found = await self._on_thread(look)
        self._folders[call_id] = folder, frozenset(sizes)
        stack.callback(self._folders.pop, call_id, None)
        return BlobFiles(sizes, found, *figures)

    def _staged_folder(self, of: int) -> Path:
        message = self._staged.get(of)
        if message is None or message.folder is None:
            raise _NOWHERE
        return message.folder


def _read(path: Path, offset: int) -> bytes:
    with open_regular(path) as file:
        file.seek(offset)
        return file.read(PIECE_BYTES)


def _write(path: Path, offset: int, content: bytes) -> None:
    if offset == 0:
        path.unlink(missing_ok=True)  # it may be a hard link to what was sent
    with path.open("xb" if offset == 0 else "r+b") as file:
        file.seek(offset)
        file.write(content)


def scratch_prefix(replica: str) -> str:
    """The beginning of the names of a replica's own folders on the stores' file system."""
    return f"engine-{replica}-"


class FleetBlobs:
    """A `BlobServer` for each link, a `ContentServer` if the replica does not see this process's files. On the event
    loop.
    """

    def __init__(self, blobs: StoredBlobs, num_threads: int, scratch: Path, timeout: float) -> None:
        self._parts = blobs, num_threads, scratch, timeout
        self._servers: dict[ReplicaLink, BlobServer] = {}

    def run(self, link: ReplicaLink, message: FromEngine) -> None:
        """Answer what a replica's loaders ask."""
        assert isinstance(message, BlobMessage), "a replica says nothing else"
        server = self._servers.get(link)
        if server is None:
            server = self._servers[link] = self._server_of(link)
        server.run(message, link.tell)

    def _server_of(self, link: ReplicaLink) -> BlobServer:
        prefix = scratch_prefix(link.replica)
        if link.sees_files:
            return BlobServer(*self._parts, prefix=prefix)
        return ContentServer(*self._parts, prefix=prefix, staged=link.staged)

    async def close_link(self, link: ReplicaLink) -> None:
        """The link has ended: close the folders that it held."""
        if (server := self._servers.pop(link, None)) is not None:
            await server.close()

    async def close(self) -> None:
        """End the threads, after all links have ended."""
        for link in list(self._servers):
            await self.close_link(link)


class ReplicaBlobs(Blobs, StagedFolders):
    """The folders for a replica's loaders and registrations. `gateways` is set before the first call. Every gateway may
    leave at any time: then another is asked.
    """

    gateways: Gateways

    def __init__(self, cache: DiskStore, prefix: str) -> None:
        """`cache`: of copies. `prefix`: of the names of this replica's folders among a gateway's files."""
        self._cache = cache
        self._prefix = prefix
        self._calls = BlobCalls()
        self.answered = self._calls.answered

    @contextmanager
    def verified(self, digest: str) -> Iterator[VerifiedBlob]:
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
        with ExitStack() as stack:
            if self._cache.has(digest):
                yield stack.enter_context(self._cache.open(digest))
            else:
                yield self._of_any(lambda gateway: self._near_at(gateway, digest), stack)[1].folder

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        if self._cache.has(digest):
            self._cache.keep_beside(digest, name, content)
            return
        with ExitStack() as stack:
            gateway, blob = self._of_any(lambda gateway: self._near_at(gateway, digest), stack)
            folder = stack.enter_context(scratch_folder(blob.scratch, self._prefix))
            (folder / name).write_bytes(content)
            self._ask(gateway, KeepBeside(self._calls.new_id(), digest, folder / name))

    @contextmanager
    def open_folder(self, message: Convert | Validate) -> Iterator[Path]:
        if message.folder is not None:
            yield message.folder
            return
        gateway, of = self.gateways.caller_of(message.call_id)
        with ExitStack() as stack:
            with self._open(gateway, OpenStaged(self._calls.new_id(), of)) as (opened, files):
                assert isinstance(files, BlobFiles)
                copy = self._fetched(gateway, opened, files, stack)
            yield copy

    def bring_back(self, message: Convert, folder: Path) -> Converted | None:
        if message.folder is not None:
            return None
        gateway, of = self.gateways.caller_of(message.call_id)
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
                assert isinstance(piece, FilePiece)
                file.write(piece.content)

    def _kept(self, digest: str, copy: Path, seconds: float) -> Path | None:
        """The copy in the cache; None if the cache is full."""
        try:
            return self._cache.keep(digest, copy, seconds)
        except AdapterUnavailableError as error:
            _log.warning("%s is not kept on the engine's disk: %s", digest, error)
            return None

    def _ask(self, gateway: str, call: BlobCall) -> ReplyValue:
        return self._calls.ask(call, lambda: self.gateways.post(gateway, call), ANSWER_SECONDS)
