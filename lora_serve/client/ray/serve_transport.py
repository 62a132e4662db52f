"""The replicas of a Serve application, reached through its handle."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection

from ray import serve

from lora_serve.client.ray import registry
from lora_serve.client.ray.stream import FrameStream, Place, decoded


class ServeTransport:
    """See `Transport`. Made on the event loop, which Serve's router then runs on, too.

    Frames go past Serve, over connections of their own (docs/decisions/fleet-streams.md). Serve tells once where a
    replica is: its own channel to a host that was cut off needs seconds to work again, a new connection none.
    """

    def __init__(self, application: str) -> None:
        self._application = application
        _take_over_logs()
        handle = serve.get_app_handle(application)
        handle._init(_run_router_in_separate_loop=False)  # noqa: SLF001  the only way to say so
        self._handle = handle.options(_by_reference=False)
        self._place = self._handle.options(method_name="place")
        self._places: dict[str, Place] = {}  # by replica, as long as it is listed
        self._streams: dict[str, FrameStream] = {}  # by gateway

    def follow(self, listed: Callable[[Collection[str]], None]) -> None:
        """See `Transport`."""

        def forget_others(replicas: Collection[str]) -> None:
            self._places = {replica: place for replica, place in self._places.items() if replica in replicas}
            listed(replicas)

        registry.listen(self._application, forget_others)

    async def events(self, replica: str, gateway: str) -> AsyncIterator[bytes]:
        """See `Transport`."""
        if (place := self._places.get(replica)) is None:
            place = self._places[replica] = decoded(await self._place.remote(replica=replica))
        stream = self._streams[gateway] = await FrameStream.open(place, gateway)
        try:
            async for frame in stream.frames():
                yield frame
        finally:
            del self._streams[gateway]
            stream.close()

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        """See `Transport`. After the end of `events` the frame is lost."""
        if (stream := self._streams.get(gateway)) is not None:
            stream.send(frame)
            await stream.room()

    async def close(self) -> None:
        """See `Transport`."""
        registry.forget(self._application)
        await self._handle.shutdown_async()


def _take_over_logs() -> None:
    """Serve's own handlers write to standard error past this server's log, line by line for each lost call."""
    logger = logging.getLogger("ray.serve")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.ERROR)
