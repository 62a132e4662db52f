"""GET /admin/fleet: the engines behind this server, and where an adapter lives among them."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.errors import AdapterNotFoundError, LoraServeError
from lora_serve.core.stats import EMPTY, EngineStats, ReplicaStats
from lora_serve.server.answers.json_answer import json_response
from lora_serve.server.bodies.json_body import check_query
from lora_serve.server.fleet import places_of, replicas_of
from lora_serve.server.schemas.answers import admin as wire
from lora_serve.server.schemas.queries import FleetQuery
from lora_serve.server.services import SERVICES, Services

_DIGEST = "sha256:"


async def get_fleet(request: web.Request) -> web.StreamResponse:
    """Show the engines behind this server.

    State, load and adapters of each; with `adapter`, the ones that hold it.
    """
    services, wanted = request.app[SERVICES], check_query(FleetQuery, request).adapter
    stats = await _stats(services)
    replicas = replicas_of(services, stats)
    num_lost = 0 if stats is None else stats.num_replicas_lost
    num_restarts = services.metrics.num_engine_restarts
    in_fleet = stats is not None and stats.replicas is not None
    return json_response(
        wire.Fleet(
            data=[_card(replica) for replica in replicas],
            replicas=[_in_short(replica, 0 if in_fleet else num_restarts) for replica in replicas],
            router=wire.RouterCard(services.config.router) if in_fleet else None,
            restarts=num_restarts + num_lost,
            adapter=None if wanted is None else _adapter(services.catalog.snapshot, wanted, replicas),
        )
    )


async def _stats(services: Services) -> EngineStats | None:
    try:
        return await services.client.stats()
    except LoraServeError:
        return None


def _card(replica: ReplicaStats) -> wire.ReplicaCard:
    """One engine; the figures are 0 until it has told some."""
    stats = replica.stats or EMPTY
    return wire.ReplicaCard(
        id=replica.replica,
        node=replica.node,
        pid=stats.pid,
        state=replica.state,
        reason=replica.reason,
        version=replica.version,
        base_fingerprint=replica.fingerprint,
        age_seconds=round(replica.age, 1),
        num_requests=replica.num_requests,
        num_servers=replica.num_servers,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_tokens=stats.num_waiting_tokens,
        num_running_tokens=stats.num_running_tokens,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        max_loras=stats.max_loras,
        slots=[replace(slot, replica=replica.replica) for slot in stats.slots],
        num_host_adapters=len(stats.host_digests),
        loading_digests=stats.loading_digests,
        tiers=stats.tiers,
    )


def _in_short(replica: ReplicaStats, num_restarts: int) -> wire.ReplicaInShort:
    """`num_restarts`: 0 in a fleet, where a new engine has a new id."""
    stats = replica.stats or EMPTY
    resident = [slot.digest for slot in stats.slots]
    load = stats.num_running, stats.num_waiting
    return wire.ReplicaInShort(replica.replica, replica.node, replica.state, resident, *load, num_restarts)


def _adapter(snapshot: Snapshot, wanted: str, replicas: tuple[ReplicaStats, ...]) -> wire.AdapterPlaces:
    """The adapter's versions, and who holds each. Raises AdapterNotFoundError."""
    name, versions = _versions(snapshot, wanted)
    return wire.AdapterPlaces(
        name, [wire.VersionPlaces(version, digest, list(places_of(digest, replicas))) for digest, version in versions]
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
