"""The engines behind this server: the replicas of a fleet, or its one engine in the same words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

from lora_serve import __version__
from lora_serve.core.stats import EngineStats, ReplicaState, ReplicaStats
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.schemas.answers.adapters import AdapterPlace
from lora_serve.server.services import Services

ONLY_ENGINE = "0"  # as /metrics has it in the label `engine`
_STATES = {
    ServerState.STARTING: ReplicaState.STARTING,
    ServerState.READY: ReplicaState.READY,
    ServerState.DRAINING: ReplicaState.DRAINING,
    ServerState.FAILED: ReplicaState.LOST,
}


def replicas_of(services: Services, stats: EngineStats | None) -> tuple[ReplicaStats, ...]:
    """The fleet's replicas. A server without a fleet has one, which is its own; `stats` None: it does not answer."""
    if stats is not None and stats.replicas is not None:
        return stats.replicas
    lifecycle = services.lifecycle
    return (
        ReplicaStats(
            ONLY_ENGINE,
            "localhost",
            _STATES[lifecycle.state],
            lifecycle.reason,
            __version__,
            services.spec.fingerprint,
            time.monotonic() - lifecycle.engine_since,
            0 if stats is None else stats.num_running + stats.num_waiting,
            stats=stats,
        ),
    )


def places_of(digest: str, replicas: tuple[ReplicaStats, ...]) -> Iterator[AdapterPlace]:
    """The engines that hold the adapter or load it."""
    for replica in replicas:
        stats = replica.stats
        if stats is None:
            continue
        slot = next((slot for slot in stats.slots if slot.digest == digest), None)
        tiers: list[Literal["host", "device"]] = ["host"] if digest in stats.host_digests else []
        tiers += ["device"] if slot is not None else []
        is_loading = digest in stats.loading_digests
        if tiers or is_loading:
            is_pinned, num_rows = (slot.pinned, slot.num_rows) if slot else (False, 0)
            yield AdapterPlace(replica.replica, tiers, is_loading, is_pinned, num_rows)
