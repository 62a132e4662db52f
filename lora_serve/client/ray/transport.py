"""The seam between a fleet's client and Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from typing import Protocol


class Transport(Protocol):
    """The replicas as a gateway reaches them. On the event loop. What fails raises any exception."""

    def follow(self, listed: Callable[[Collection[str]], None]) -> None:
        """From now on `listed` is called with the names of all replicas that take requests, at each change of them."""

    def events(self, replica: str, gateway: str) -> AsyncIterator[bytes]:
        """The frames of a replica for a gateway, until either of them is gone. Closing it ends the gateway's requests.

        `gateway`: a name that no stream before this one had.
        """

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        """Send a replica a frame of messages; returns when there is room for another. Frames come in the order of the
        calls, if each call is made after the last one's end.
        """

    async def close(self) -> None:
        """No replica is reached any more."""
