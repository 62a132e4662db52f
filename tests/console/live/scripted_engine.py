"""An engine whose looks a test writes, and a hub over it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lora_serve.console.live.frames import Viewer
from lora_serve.console.live.hub import Hub, Watched
from lora_serve.core.live import (
    EngineView,
    LiveAdapter,
    LiveCount,
    LiveLimits,
    LiveLoad,
    LiveMove,
    LiveRequest,
    LiveSettings,
    LiveSlot,
    LiveStep,
    LiveTargets,
    LiveTier,
)

SETTINGS = LiveSettings(
    LiveLimits(64, 512, 0.0, "no target is set"),
    LiveTargets(None, 50.0),
    64,
    16,
    {"device": LiveTier(70, 100, 2, 1, 1, 2, 0), "host": LiveTier(90, 0, 3, 0, 2, 3, 0)},
)
DISK = LiveTier(1000, 0, 9, 0, 0, 9, 0)


def request(tenant: str, number: int = 1, state: str = "running", **fields: Any) -> LiveRequest:
    """A tenant's request; its id and its adapter's names all hold the tenant's."""
    adapter = LiveAdapter(f"{tenant}/a", 1, f"sha256:{tenant}", 1.0)
    return LiveRequest(f"{tenant}-r{number}", tenant, (adapter,), state, 8, 8, number, 0, 1000.0, **fields)


def step(number: int, *tenants: str, at: float | None = None) -> LiveStep:
    """A step in which the first request of each of the tenants got a token."""
    rows = tuple((f"{tenant}-r1", "decode", 1, 1) for tenant in tenants)
    return LiveStep(number, time.time() if at is None else at, 2.0, False, rows)


def look(*tenants: str, mark: int = 1, **fields: Any) -> EngineView:
    """The tenants' requests run, each on an adapter of its own, which has just come."""
    parts = {
        "requests": tuple(request(tenant) for tenant in tenants),
        "queue": {tenant: LiveCount(0, 1) for tenant in tenants},
        "slots": tuple(
            LiveSlot(index, f"{tenant}/a", tenant, f"sha256:{tenant}", 35, 1, False)
            for index, tenant in enumerate(tenants)
        ),
        "loads": tuple(LiveLoad(f"sha256:{tenant}-b", tenant, f"{tenant}/b") for tenant in tenants),
        "moves": tuple(LiveMove(f"sha256:{tenant}", f"{tenant}/a", tenant, "disk", "host", 1.5) for tenant in tenants),
        "settings": SETTINGS,
        "max_loras": 4,
        "num_blocks": 10,
        "num_free_blocks": 6,
        "num_known_blocks": 3,
    }
    return EngineView(mark, **{**parts, **fields})


@dataclass
class ScriptedEngine:
    """Its `watch` is the one of `EngineClient`."""

    present: EngineView = field(default_factory=look)
    steps: list[LiveStep] = field(default_factory=list)  # that nobody was told yet
    error: Exception | None = None
    asked: list[tuple[dict[str, int], tuple[str, ...], bool]] = field(default_factory=list)
    replicas: tuple[str, ...] = ("",)

    async def watch(
        self, seen: Mapping[str, int], tenants: Collection[str] = (), *, in_full: bool = False
    ) -> list[EngineView]:
        self.asked.append((dict(seen), tuple(tenants), in_full))
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        steps, self.steps = tuple(self.steps), []
        return [msgspec.structs.replace(self.present, steps=steps, replica=replica) for replica in self.replicas]


def hub_over(engine: ScriptedEngine, **fields: Any) -> Hub:
    async def store_tiers() -> Mapping[str, LiveTier]:
        return {"disk": DISK}

    parts = {
        "store_tiers": store_tiers,
        "num_restarts": lambda: 0,
        "ending": lambda: None,
        "owns": lambda *_: True,
        **fields,
    }
    return Hub(Watched(engine, **parts))  # type: ignore[arg-type]


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    """The name and the data of a server-sent event."""
    name, data, *rest = event.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def next_event(viewer: Viewer) -> tuple[str, dict[str, Any]]:
    """The next event that is one; wakes are passed over."""
    async with asyncio.timeout(60):
        while (event := await viewer.next()) is None:
            pass
    return parsed(event)


async def next_frame(viewer: Viewer) -> dict[str, Any]:
    name, frame = await next_event(viewer)
    assert name == "frame"
    return frame
