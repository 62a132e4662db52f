"""A fleet without Ray: the replicas' own code over the fake runner, and a transport that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from lora_serve.client.ray.attached import LinkUsers
from lora_serve.client.ray.client import RayEngineClient
from lora_serve.core.config import QueueLimits
from lora_serve.engine_host.fleet.replica_blobs import ReplicaBlobs
from lora_serve.engine_host.fleet.replica_engine import ReplicaEngine
from tests.engine_host.fake_engine import FakeServed

LIMITS = QueueLimits(1024)


class GoneError(Exception):
    """The replica is not there."""


class FakeReplica:
    """A replica in this process. What it is given is noted."""

    def __init__(self, name: str, blobs: ReplicaBlobs | None = None, **greeting: Any) -> None:
        self.served = FakeServed()
        self.engine = ReplicaEngine(self.served, name, "settings", b"key", blobs=blobs, report_seconds=0.05)
        plain = self.engine.greeting
        self.engine.greeting = lambda: msgspec.structs.replace(plain(), **greeting)  # type: ignore[method-assign]
        self.dead = asyncio.Event()
        self.runs = asyncio.Event()  # unless it is stopped, or cut off
        self.runs.set()
        self.gateways: list[str] = []  # attached now
        self.num_frames = 0  # that were taken

    def set_spec(self, **fields: Any) -> None:
        """Another base model, as it says."""
        self.engine._spec = replace(self.engine._spec, **fields)


class FakeFleet:
    """See `Transport`."""

    def __init__(self) -> None:
        self.replicas: dict[str, FakeReplica] = {}
        self.listed: set[str] = set()
        self._tell: Callable[[Collection[str]], None] = lambda names: None

    def add(self, name: str, *, listed: bool = True, **greeting: Any) -> FakeReplica:
        replica = self.replicas[name] = FakeReplica(name, **greeting)
        if listed:
            self.list(name)
        return replica

    def list(self, name: str) -> None:
        self.listed.add(name)
        self._tell(self.listed)

    def unlist(self, name: str) -> None:
        self.listed.discard(name)
        self._tell(self.listed)

    def kill(self, name: str) -> None:
        """Its streams and calls end with an error; Ray Serve has not noticed yet."""
        self.replicas[name].dead.set()

    def follow(self, listed: Callable[[Collection[str]], None]) -> None:
        self._tell = listed
        listed(self.listed)

    async def events(self, replica: str, gateway: str) -> AsyncIterator[bytes]:
        found = self._found(replica)
        found.gateways.append(gateway)
        try:
            async with aclosing(found.engine.events(gateway)) as frames:
                while True:
                    frame = asyncio.ensure_future(anext(frames))
                    dead = asyncio.ensure_future(found.dead.wait())
                    try:
                        await asyncio.wait({frame, dead}, return_when=asyncio.FIRST_COMPLETED)
                        self._found(replica)
                        await found.runs.wait()
                        self._found(replica)
                        item = frame.result()
                    finally:
                        for task in (frame, dead):
                            task.cancel()
                        await asyncio.gather(frame, dead, return_exceptions=True)
                    yield item
        finally:
            found.gateways.remove(gateway)

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        await asyncio.sleep(0)
        found = self._found(replica)
        await found.runs.wait()
        found.num_frames += 1
        found.engine.take(gateway, frame)

    async def close(self) -> None:
        self._tell = lambda names: None

    def _found(self, name: str) -> FakeReplica:
        replica = self.replicas.get(name)
        if replica is None or replica.dead.is_set():
            raise GoneError(name)
        return replica

    async def stop(self) -> None:
        for replica in self.replicas.values():
            await replica.engine.stop()


@asynccontextmanager
async def fleet_client(
    *names: str, wait: float = 10.0, limits: QueueLimits = LIMITS, users: LinkUsers | None = None
) -> AsyncIterator[tuple[FakeFleet, RayEngineClient]]:
    """Not started yet."""
    fleet = FakeFleet()
    for name in names:
        fleet.add(name)
    client = RayEngineClient(fleet, limits, wait, users)
    try:
        yield fleet, client
    finally:
        with contextlib.suppress(Exception):
            await client.stop()
        await fleet.stop()
