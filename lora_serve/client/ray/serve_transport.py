"""The replicas of a Serve application, reached through its handle.

A client meets the request router that Ray Serve makes for it here, by the application's name. Serve constructs routers
itself, from a pickle of their class, so neither can be handed to the other. Hence the module-level state, which is
written and read on the event loop alone.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection

import msgspec
from ray import serve

from lora_serve.client.ray.link import Transport
from lora_serve.client.wire import FrameStream, ReplicaAddress

Listener = Callable[[Collection[str]], None]
_listeners: dict[str, Listener] = {}
_listed: dict[str, tuple[str, ...]] = {}


class ServeTransport(Transport):
    """Made on the event loop, which Serve's router then runs on, too.

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
        self._places: dict[str, ReplicaAddress] = {}  # by replica, as long as it is listed
        self._streams: dict[str, FrameStream] = {}  # by gateway

    def follow(self, listed: Callable[[Collection[str]], None]) -> None:

        def forget_others(replicas: Collection[str]) -> None:
            self._places = {replica: place for replica, place in self._places.items() if replica in replicas}
            listed(replicas)

        follow_application(self._application, forget_others)

    async def events(self, replica: str, gateway: str) -> AsyncIterator[bytes]:
        if (place := self._places.get(replica)) is None:
            data = await self._place.remote(replica=replica)
            place = self._places[replica] = msgspec.msgpack.decode(data, type=ReplicaAddress)
        stream = self._streams[gateway] = await FrameStream.open(place, gateway)
        try:
            async for frame in stream.frames():
                yield frame
        finally:
            del self._streams[gateway]
            stream.close()

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        """After the end of `events` the frame is lost."""
        if (stream := self._streams.get(gateway)) is not None:
            stream.send(frame)
            await stream.drained()

    async def close(self) -> None:
        _listeners.pop(self._application, None)
        _listed.pop(self._application, None)
        await self._handle.shutdown_async()


def _take_over_logs() -> None:
    """Serve's own handlers write to standard error past this server's log, line by line for each lost call."""
    logger = logging.getLogger("ray.serve")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.ERROR)


def follow_application(application: str, listener: Listener) -> None:
    """Calls `listener` with the names of the application's running replicas, now if they are known, and later on."""
    _listeners[application] = listener
    if application in _listed:
        listener(_listed[application])


def list_replicas(application: str, replicas: Collection[str]) -> None:
    """Called by the router with all replicas that take requests."""
    _listed[application] = tuple(replicas)
    if application in _listeners:
        _listeners[application](_listed[application])
