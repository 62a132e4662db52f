"""An adapter's card: the catalog's facts, and the tiers that have the adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry, shown_source
from lora_serve.adapters.catalog.noted_template import KEY, noted_template
from lora_serve.core.adapter import AdapterState
from lora_serve.core.stats import AdapterCounters, EngineStats, LoadTimes
from lora_serve.server.fleet import places_of
from lora_serve.server.inference.defaults import metadata_warnings

Places = Callable[[str], tuple[str, ...]]  # digest -> the tiers below host memory that have it


def _on_disk(digest: str) -> tuple[str, ...]:
    return ("disk",)


def _nowhere(digest: str) -> tuple[str, ...]:
    return ()


def adapter_card(
    entry: CatalogEntry,
    stats: EngineStats | None,
    places: Places = _on_disk,
    aliases: Sequence[str] = (),
    defaults: dict[str, Any] | None = None,
    template_rule: str = "admin",
) -> dict[str, Any]:
    """The default version's facts at the top, every version below. `stats` None: the engine cannot be asked.
    `defaults`: for requests that leave fields out. `template_rule`: see NotedTemplate.
    """
    canary, facts = entry.route.canary, _version_card(entry.default, stats, places, template_rule)
    return {
        "id": entry.name,
        "object": "adapter",
        "tenant": entry.tenant,
        "shared_with": list(entry.shared_with),
        "pinned": entry.pinned,
        "created": int(entry.created),
        "metadata": dict(entry.metadata),
        "defaults": defaults,
        "version": entry.default_version,
        "route": {
            "version": entry.default_version,
            "canary": None if canary is None else {"version": canary.version, "percent": canary.percent},
            "history": list(entry.history),
        },
        "aliases": list(aliases),
        **facts,
        "warnings": [*facts["warnings"], *metadata_warnings(entry.metadata)],
        "versions": [
            {
                "version": version.version,
                "created": int(version.created),
                **_version_card(version, stats, places, template_rule),
            }
            for version in entry.versions
        ],
    }


def tenant_card(
    entry: CatalogEntry,
    tenant: str,
    aliases: Sequence[str] = (),
    defaults: dict[str, Any] | None = None,
    template_rule: str = "admin",
) -> dict[str, Any]:
    """The card for a tenant, in the same form. Tiers and counters are the operator's only, as another tenant may have
    the same bytes. The card of a shared adapter shows no more than it takes to use it.
    """
    shown = entry
    if entry.tenant != tenant:
        versions = tuple(replace(version, source="") for version in entry.versions)
        shown = replace(entry, metadata={}, pinned=False, shared_with=(tenant,), versions=versions)
    own_aliases = [alias for alias in aliases if alias.startswith(f"{tenant}/")]
    return adapter_card(shown, None, _nowhere, own_aliases, defaults, template_rule)


def state_of(digest: str, stats: EngineStats | None) -> AdapterState:
    """The fastest tier that has the bytes, as a state."""
    if stats is None:
        return AdapterState.REGISTERED
    if any(slot.digest == digest for slot in stats.slots):
        return AdapterState.ON_DEVICE
    if digest in stats.loading_digests:
        return AdapterState.FETCHING
    return AdapterState.ON_HOST if digest in stats.host_digests else AdapterState.REGISTERED


def _version_card(
    version: VersionEntry, stats: EngineStats | None, places: Places, template_rule: str
) -> dict[str, Any]:
    counters = stats.adapters.get(version.digest, AdapterCounters()) if stats else AdapterCounters()
    traits, noted = version.traits, dict(version.summary)
    noted.pop("traits", None)
    noted.pop(KEY, None)
    template = noted_template(version)
    return {
        "digest": version.digest,
        "rank": version.rank,
        "targets": noted.pop("targets", []),
        "bytes": version.num_bytes,
        "source": shown_source(version.source),
        "kinds": noted.pop("kinds", []),
        "composable": traits.is_additive,
        "invocation_tokens": list(traits.invocation_tokens),
        "probe": noted.pop("probe", None),
        "warnings": [*noted.pop("warnings", []), *([] if template is None else template.warnings(template_rule))],
        "base_fingerprint": traits.base or None,
        "chat_template": None if template is None else template.card(template_rule),
        "config": noted,
        "state": state_of(version.digest, stats).value,
        "tiers": [*places(version.digest), *_engine_tiers(version.digest, stats)],
        "replicas": _replicas(version.digest, stats),
        "hits": counters.hits,
        "misses": counters.misses,
        "loads": counters.loads,
        "evictions": counters.evictions,
        "eviction_reasons": counters.eviction_reasons,
        "last_eviction": counters.last_eviction,
        "last_load_ms": round(counters.load_seconds * 1000, 3),
        "last_load": _split(counters.last_load),
    }


def _engine_tiers(digest: str, stats: EngineStats | None) -> list[str]:
    if stats is None:
        return []
    is_on_device = any(slot.digest == digest for slot in stats.slots)
    return ["host"] * (digest in stats.host_digests) + ["device"] * is_on_device


def _replicas(digest: str, stats: EngineStats | None) -> list[dict[str, Any]] | None:
    """The replicas that hold the adapter; None: there is no fleet, or the caller is not shown it."""
    if stats is None or stats.replicas is None:
        return None
    return [asdict(place) for place in places_of(digest, stats.replicas)]


def _split(times: LoadTimes | None) -> dict[str, Any] | None:
    """The phases of the last load; None: there was none yet."""
    if times is None:
        return None
    phases = {
        "fetch": times.fetch,
        "verify": times.verify,
        "parse": times.parse + times.fold,
        "copy": times.copy,
    }
    return {"tier": times.tier} | {f"{name}_ms": round(seconds * 1000, 3) for name, seconds in phases.items()}
