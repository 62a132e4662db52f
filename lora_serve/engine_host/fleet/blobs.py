"""Adapters' folders for replicas on this machine: this server's stores, opened for whichever replica asks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from lora_serve.adapters.loading.blobs import StoredBlobs
from lora_serve.client.ray.link import ReplicaLink
from lora_serve.core.messages import BlobMessage, FromEngine
from lora_serve.engine_host.blob_server import BlobServer


def scratch_prefix(replica: str) -> str:
    """The beginning of the names of a replica's own folders on the stores' file system."""
    return f"engine-{replica}-"


class FleetBlobs:
    """A `BlobServer` for each link. On the event loop."""

    def __init__(self, blobs: StoredBlobs, num_threads: int, scratch: Path, timeout: float) -> None:
        self._make: Callable[[str], BlobServer] = functools.partial(BlobServer, blobs, num_threads, scratch, timeout)
        self._servers: dict[ReplicaLink, BlobServer] = {}

    def run(self, link: ReplicaLink, message: FromEngine) -> None:
        """Answer what a replica's loaders ask."""
        assert isinstance(message, BlobMessage), "a replica says nothing else"
        server = self._servers.get(link)
        if server is None:
            server = self._servers[link] = self._make(scratch_prefix(link.replica))
        server.run(message, link.tell)

    async def left(self, link: ReplicaLink) -> None:
        """The link has ended: close the folders that it held."""
        if (server := self._servers.pop(link, None)) is not None:
            await server.close()

    async def close(self) -> None:
        """End the threads, after all links have ended."""
        for link in list(self._servers):
            await self.left(link)
