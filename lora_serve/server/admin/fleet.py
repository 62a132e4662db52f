"""GET /admin/fleet: the engines behind this server, and where an adapter lives among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from aiohttp import web
from msgspec import Struct

from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.errors import AdapterNotFoundError
from lora_serve.core.stats import EMPTY, ReplicaState, ReplicaStats, SlotInfo
from lora_serve.core.tier_stats import TierStats
from lora_serve.server.admin.answers import AdapterPlace
from lora_serve.server.admin.card import places_of
from lora_serve.server.admin.protocol import FleetQuery
from lora_serve.server.answers import json_response
from lora_serve.server.json_body import check_query
from lora_serve.server.services import SERVICES, replicas_of

_DIGEST = "sha256:"


class ReplicaCard(Struct, kw_only=True):
    """`core/stats.py: ReplicaStats`, and what its engine does and holds; 0 until it has told."""

    id: str
    object: Literal["replica"] = "replica"
    node: str
    pid: int | None  # of the engine's process, there
    state: ReplicaState
    reason: str
    version: str
    base_fingerprint: str
    age_seconds: float
    num_requests: int
    num_servers: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_running_tokens: int
    num_blocks: int
    num_free_blocks: int
    max_loras: int
    slots: list[SlotInfo]
    num_host_adapters: int
    loading_digests: Sequence[str]
    tiers: Mapping[str, TierStats]


class VersionPlaces(Struct):
    version: int | None
    digest: str
    places: list[AdapterPlace]


class AdapterPlaces(Struct):
    id: str
    versions: list[VersionPlaces]


class ReplicaInShort(Struct):
    """The figures of an engine that a program asks for often."""

    id: str
    node: str
    state: ReplicaState
    resident: list[str]
    num_running: int
    num_waiting: int
    restarts: int


class RouterCard(Struct):
    name: str


class Fleet(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ReplicaCard]
    replicas: list[ReplicaInShort]
    router: RouterCard | None
    restarts: int
    adapter: AdapterPlaces | None


async def get_fleet(request: web.Request) -> web.StreamResponse:
    """Show the engines behind this server.

    State, load and adapters of each; with `adapter`, the ones that hold it.
    """
    services, wanted = request.app[SERVICES], check_query(FleetQuery, request).adapter
    stats = await services.engine_stats()
    replicas = replicas_of(services, stats)
    num_lost = 0 if stats is None else stats.num_replicas_lost
    num_restarts = services.metrics.num_engine_restarts
    in_fleet = stats is not None and stats.replicas is not None
    return json_response(
        Fleet(
            data=[_card(replica) for replica in replicas],
            replicas=[_in_short(replica, 0 if in_fleet else num_restarts) for replica in replicas],
            router=RouterCard(services.config.router) if in_fleet else None,
            restarts=num_restarts + num_lost,
            adapter=None if wanted is None else _adapter(services.catalog.snapshot, wanted, replicas),
        )
    )


def _card(replica: ReplicaStats) -> ReplicaCard:
    """One engine; the figures are 0 until it has told some."""
    stats, names = replica.stats or EMPTY, ReplicaCard.__struct_fields__
    same = {name: getattr(one, name) for one in (replica, stats) for name in names if hasattr(one, name)}
    own = {
        "id": replica.replica,
        "base_fingerprint": replica.fingerprint,
        "age_seconds": round(replica.age, 1),
        "slots": [replace(slot, replica=replica.replica) for slot in stats.slots],
        "num_host_adapters": len(stats.host_digests),
    }
    return ReplicaCard(**same | own)


def _in_short(replica: ReplicaStats, num_restarts: int) -> ReplicaInShort:
    """`num_restarts`: 0 in a fleet, where a new engine has a new id."""
    stats = replica.stats or EMPTY
    resident = [slot.digest for slot in stats.slots]
    load = stats.num_running, stats.num_waiting
    return ReplicaInShort(replica.replica, replica.node, replica.state, resident, *load, num_restarts)


def _adapter(snapshot: Snapshot, wanted: str, replicas: tuple[ReplicaStats, ...]) -> AdapterPlaces:
    """The adapter's versions, and who holds each. Raises AdapterNotFoundError."""
    name, versions = _versions(snapshot, wanted)
    return AdapterPlaces(
        name, [VersionPlaces(version, digest, list(places_of(digest, replicas))) for digest, version in versions]
    )


def _versions(snapshot: Snapshot, wanted: str) -> tuple[str, list[tuple[str, int | None]]]:
    """(the id, (digest, number) of each version) that an id or a digest means. Raises
    AdapterNotFoundError.
    """
    if wanted.startswith(_DIGEST):
        if wanted not in snapshot.digests:
            raise AdapterNotFoundError(wanted)
        return wanted, [(wanted, None)]
    entry = snapshot.entries.get(wanted)
    if entry is None:
        raise AdapterNotFoundError(wanted)
    return entry.name, [(version.digest, version.version) for version in entry.versions]
