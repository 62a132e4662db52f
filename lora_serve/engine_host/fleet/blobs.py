"""Adapters' folders for replicas: this server's stores, opened for whichever replica asks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint.content import CONTENT_NAMES, adapter_digest, content_names
from lora_serve.adapters.loading.blobs import StoredBlobs
from lora_serve.adapters.regular_file import open_regular
from lora_serve.client.ray.link import ReplicaLink
from lora_serve.core.blob_messages import (
    PIECE_BYTES,
    BlobCall,
    BlobFiles,
    BlobMessage,
    FilePiece,
    OpenBlob,
    OpenStaged,
    ReadPiece,
    WritePiece,
)
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import Convert, FromEngine, ReplyValue, Validate
from lora_serve.engine_host.remote_blobs import BlobServer

_NOWHERE = AdapterUnavailableError("The adapter's files are elsewhere.")


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

    async def left(self, link: ReplicaLink) -> None:
        """The link has ended: close the folders that it held."""
        if (server := self._servers.pop(link, None)) is not None:
            await server.close()

    async def close(self) -> None:
        """End the threads, after all links have ended."""
        for link in list(self._servers):
            await self.left(link)
