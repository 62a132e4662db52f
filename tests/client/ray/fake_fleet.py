"""A fleet without Ray: the replicas' own code over the fake runner, and a transport that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from lora_serve.client.ray.attached import LinkUsers
from lora_serve.client.ray.client import RayEngineClient
from lora_serve.core.messages import FromEngine
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine_host.fleet.blobs import ReplicaBlobs
from lora_serve.engine_host.fleet.replica_engine import ReplicaEngine
from tests.engine_host.fake_engine import FakeServed

LIMITS = QueueLimits()


class GoneError(Exception):
    """The replica is not there."""


class Sink:
    """See `gateways.FrameSink`."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.is_closed = asyncio.Event()
        self.can_write = True

    def send(self, body: bytes) -> None:
        self.frames.put_nowait(body)

    def close(self) -> None:
        self.is_closed.set()


class FakeReplica:
    """A replica in this process. What it is given is noted."""

    def __init__(self, name: str, blobs: ReplicaBlobs | None = None, **greeting: Any) -> None:
        self.served = FakeServed()
        self.engine = ReplicaEngine(self.served, name, "settings", b"key", blobs=blobs, report_seconds=0.05)
        plain = self.engine.greeting

        def changed() -> Sequence[FromEngine]:
            first, *rest = plain()
            return [msgspec.structs.replace(first, **greeting), *rest]

        self.engine.greeting = changed  # type: ignore[method-assign]
        self.dead = asyncio.Event()
        self.runs = asyncio.Event()  # unless it is stopped, or cut off
        self.runs.set()
        self.is_reachable = asyncio.Event()  # for gateways that come
        self.is_reachable.set()
        self.num_visits = 0  # of gateways, in vain or not
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
        found, sink = self._found(replica), Sink()
        found.num_visits += 1
        await found.is_reachable.wait()
        found.gateways.append(gateway)
        found.engine.gateways.attach(gateway, sink, found.engine.greeting())
        try:
            while not sink.is_closed.is_set():
                item = asyncio.ensure_future(sink.frames.get())
                ends = [asyncio.ensure_future(event.wait()) for event in (found.dead, sink.is_closed)]
                try:
                    await asyncio.wait({item, *ends}, return_when=asyncio.FIRST_COMPLETED)
                    self._found(replica)
                    await found.runs.wait()
                    self._found(replica)
                    frame = item.result() if item.done() else None
                finally:
                    for task in (item, *ends):
                        task.cancel()
                    await asyncio.gather(item, *ends, return_exceptions=True)
                if frame is not None:
                    yield frame
        finally:
            found.engine.gateways.detach(gateway)
            found.gateways.remove(gateway)

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        await asyncio.sleep(0)
        found = self._found(replica)
        assert gateway in found.gateways, "nobody is there yet"
        await found.runs.wait()
        found.num_frames += 1
        found.engine.gateways.take(gateway, frame)

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
