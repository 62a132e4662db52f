"""The replicas of a Serve application, reached through its handle."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection

from ray import serve

from lora_serve.client.ray import registry


class ServeTransport:
    """See `Transport`. Made on the event loop, which Serve's router then runs on, too.

    Calls go over Serve's gRPC connection to the replica instead of Ray's object store: a frame costs a third.
    """

    def __init__(self, application: str) -> None:
        self._application = application
        _take_over_logs()
        handle = serve.get_app_handle(application)
        handle._init(_run_router_in_separate_loop=False)  # noqa: SLF001  the only way to say so
        self._handle = handle.options(_by_reference=False)
        self._events = self._handle.options(method_name="events", stream=True)
        self._take = self._handle.options(method_name="take")

    def follow(self, listed: Callable[[Collection[str]], None]) -> None:
        """See `Transport`."""
        registry.listen(self._application, listed)

    async def events(self, replica: str, gateway: str) -> AsyncIterator[bytes]:
        """See `Transport`."""
        response = self._events.remote(gateway, replica=replica)
        try:
            async for frame in response:
                yield frame
        finally:
            response.cancel()

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        """See `Transport`."""
        await self._take.remote(gateway, frame, replica=replica)

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
