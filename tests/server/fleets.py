"""A mock engine that plays a fleet of three, with an adapter on one replica and a pinned one on all."""

from __future__ import annotations

from typing import Any

from lora_serve.core.messages import Pin, Prefetch

REPLICAS = ("r-a", "r-b", "r-c")


async def play_fleet(house: Any) -> str:
    """Returns the replica that holds `acme/one`; `acme/all` is pinned, `acme/none` nowhere."""
    house.engine.replicas = REPLICAS
    one, pinned = await house.register("acme/one", seed=1), await house.register("acme/all", seed=2)
    await house.register("acme/none", seed=3)
    await house.engine.adapters(Prefetch(one))
    await house.engine.adapters(Pin(pinned))
    return str(house.engine.replica_of(one.digest))
