"""The adapters that a caller of the admin API may see and change, and their cards: facts, and the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from aiohttp import web
from msgspec import to_builtins
from msgspec.structs import replace

from lora_serve.adapters.catalog.catalog import own_name
from lora_serve.adapters.catalog.entry import KEY, CatalogEntry, VersionEntry, noted_template, shown_source
from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.adapter import AdapterState
from lora_serve.core.errors import AdapterNotFoundError, ForbiddenError, InvalidRequestError
from lora_serve.core.figures import LoadTimes
from lora_serve.core.stats import AdapterCounters, EngineStats, ReplicaStats
from lora_serve.core.tenant import Caller
from lora_serve.server.admin import answers as wire
from lora_serve.server.admin.answers import ActivityCard, AdapterPlace
from lora_serve.server.answers import as_given
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.defaults import known_defaults, metadata_warnings
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.telemetry.metrics import NO_ANSWERS, WINDOW, Activity, Answers


def entry_for(snapshot: Snapshot, name: str, caller: Caller) -> CatalogEntry:
    """The adapter that `name` means for the caller. Raises AdapterNotFoundError with the name as given;
    UnreadableRecordError for a held name.
    """
    names = (name,) if caller.scope is None else (own_name(caller.scope, name), name)
    for candidate in names:
        entry = snapshot.entries.get(candidate)
        if entry is not None and entry.is_visible_to(caller.scope):
            return entry
        snapshot.check_held(candidate, caller.scope)
    raise AdapterNotFoundError(name)


def owned_entry(snapshot: Snapshot, name: str, caller: Caller) -> CatalogEntry:
    """An adapter that the caller may change. Raises AdapterNotFoundError; ForbiddenError if it is only shared;
    InvalidRequestError for an alias, for a caller that sees all.
    """
    if caller.sees_all and (target := snapshot.aliases.get(name)) is not None:
        raise InvalidRequestError(
            f"`{name}` is an alias of `{target}`: name the adapter itself. DELETE /admin/aliases/{name} takes "
            f"the alias away (lora-serve adapters alias --delete {name}).",
            param="id",
        )
    entry = entry_for(snapshot, name, caller)
    if not caller.sees_all and entry.tenant != caller.tenant:
        raise ForbiddenError(f"The adapter `{entry.name}` is shared with you; only its owner may change it.")
    return entry


def own_name_in(request: web.Request) -> str:
    """The full id of the adapter in the URL, which the caller may change. Raises what `owned_entry` does."""
    snapshot = request.app[SERVICES].catalog.snapshot
    return owned_entry(snapshot, request.match_info["id"], request[CONTEXT].known_caller).name


def pinnable_bytes(caller: Caller) -> int | None:
    """The device memory within which a caller may pin: a tenant's guaranteed share. None: no limit."""
    return None if caller.sees_all else caller.quota.device_bytes_guaranteed or 0


def _nowhere(digest: str) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class CardFigures:
    """Tiers and counters are the operator's only, as another tenant may have the same bytes; a tenant's answers are
    those that it was given itself.
    """

    stats: EngineStats | None = None  # None: the engine cannot be asked, or the caller may not
    places: Callable[[str], tuple[str, ...]] = _nowhere  # digest -> the tiers below host memory that have it
    activity: Activity | None = None
    tenant: str | None = None  # whose answers; None: everybody's
    since: float = 0.0  # Unix seconds: of an earlier tenant of this name nothing is shown
    on_device: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()

    def state(self, digest: str) -> AdapterState:
        """The fastest tier that has the bytes, as a state."""
        if digest in self.on_device:
            return AdapterState.ON_DEVICE
        if digest in self.loading:
            return AdapterState.FETCHING
        return AdapterState.ON_HOST if digest in self.on_host else AdapterState.REGISTERED

    def tiers(self, digest: str) -> list[str]:
        """The names of all tiers that have the bytes."""
        here = ["host"] * (digest in self.on_host) + ["device"] * (digest in self.on_device)
        return [*self.places(digest), *here]

    def counters(self, digest: str) -> AdapterCounters:
        """The engine's counters."""
        return (self.stats.adapters.get(digest) if self.stats else None) or AdapterCounters()

    def replicas(self, digest: str) -> list[AdapterPlace] | None:
        """The replicas that hold the adapter; None: there is no fleet, or the caller is not shown it."""
        if self.stats is None or self.stats.replicas is None:
            return None
        return list(places_of(digest, self.stats.replicas))

    def answers(self, entry: CatalogEntry, version: VersionEntry | None = None) -> Answers:
        """The answers of a version, or of all versions."""
        found = NO_ANSWERS
        for one in entry.versions if version is None else (version,):
            if self.activity is not None:
                found = found.plus(self.activity.answers(entry.name, one.digest, self.tenant, self.since))
        return found

    def routed(self, entry: CatalogEntry, version: VersionEntry) -> Answers:
        """The answers of the last minutes for which the entry's route, as it is now, chose this version."""
        if self.activity is None:
            return NO_ANSWERS
        return self.activity.routed(entry.name, version.digest, entry.route, self.tenant, self.since)


NO_FIGURES = CardFigures()


def figures_of(
    stats: EngineStats | None, places: Callable[[str], tuple[str, ...]] = _nowhere, activity: Activity | None = None
) -> CardFigures:
    """All figures, for a caller who sees all."""
    if stats is None:
        return CardFigures(None, places, activity)
    on_device = frozenset(slot.digest for slot in stats.slots)
    on_host, loading = frozenset(stats.host_digests), frozenset(stats.loading_digests)
    return CardFigures(stats, places, activity, on_device=on_device, on_host=on_host, loading=loading)


async def figures_for(services: Services, caller: Caller) -> CardFigures:
    """The figures of this moment as the caller may see them. An engine that cannot answer takes its own away only."""
    if caller.scope is not None:
        return CardFigures(activity=services.activity, tenant=caller.scope, since=caller.since)
    return figures_of(await services.engine_stats(), cache(services.places_of), services.activity)


async def card_of(services: Services, entry: CatalogEntry, caller: Caller) -> wire.AdapterCard:
    """The adapter's card, with the figures of this moment that the caller may see."""
    every, scope = services.catalog.snapshot.aliases_of(entry.name), caller.scope
    aliases = [alias for alias in every if scope is None or alias.startswith(f"{scope}/")]
    return card_from(services, entry, await figures_for(services, caller), caller, aliases)


def card_from(
    services: Services, entry: CatalogEntry, figures: CardFigures, caller: Caller, aliases: Sequence[str]
) -> wire.AdapterCard:
    """The adapter's card as the caller, who may see these aliases of it, may see it."""
    defaults = known_defaults(entry.metadata, services.config).card()
    rule = services.adapter_config.adapter_chat_templates
    return adapter_card(as_shown_to(entry, caller.scope), figures, aliases, defaults, rule)


def activity_card(answers: Answers) -> ActivityCard:
    """The answers as cards and lists show them."""
    last_used = None if answers.last_used is None else int(answers.last_used)
    return ActivityCard(answers.per_minute, last_used, WINDOW, answers.in_window, answers.errors)


def adapter_card(
    entry: CatalogEntry,
    figures: CardFigures = NO_FIGURES,
    aliases: Sequence[str] = (),
    defaults: dict[str, Any] | None = None,
    template_rule: str = "admin",
) -> wire.AdapterCard:
    """The default version's facts at the top, every version below. `defaults`: for requests that leave fields out.
    `template_rule`: see NotedTemplate.
    """
    cards = {version.version: _version_card(entry, version, figures, template_rule) for version in entry.versions}
    facts = cards[entry.default_version]
    card = {
        "id": entry.name,
        "object": "adapter",
        "tenant": entry.tenant,
        "shared_with": list(entry.shared_with),
        "pinned": entry.pinned,
        "created": int(entry.created),
        "metadata": None,
        "defaults": None,
        "version": entry.default_version,
        "route": wire.VersionRoute(entry.default_version, entry.route.canary, entry.history, _shares(entry, figures)),
        "aliases": list(aliases),
        **facts,
        "activity": activity_card(figures.answers(entry)),
        "warnings": [*facts["warnings"], *metadata_warnings(entry.metadata)],
        "versions": [
            {"version": version.version, "created": int(version.created), **cards[version.version]}
            for version in entry.versions
        ],
    }
    copied: wire.AdapterCard = to_builtins(card)  # an answer is emptied while written: nothing in it is the catalog's
    copied["metadata"], copied["defaults"] = as_given(entry.metadata), as_given(defaults)
    return copied


def as_shown_to(entry: CatalogEntry, tenant: str | None) -> CatalogEntry:
    """The entry with no more of a shared adapter than it takes to use it. `tenant` None: all of it."""
    if tenant in (None, entry.tenant):
        return entry
    versions = tuple(replace(version, source="") for version in entry.versions)
    return replace(entry, metadata={}, pinned=False, shared_with=(tenant,), versions=versions)


def adapter_row(
    entry: CatalogEntry, figures: CardFigures, aliases: Sequence[str], tenant: str | None
) -> wire.AdapterRow:
    """The few facts that a list shows of an adapter. `tenant`: see `as_shown_to`; None: all is shown."""
    version, is_own = entry.default, tenant in (None, entry.tenant)
    return wire.AdapterRow(
        id=entry.name,
        tenant=entry.tenant,
        version=entry.default_version,
        num_versions=len(entry.versions),
        canary=entry.route.canary,
        digest=version.digest,
        rank=version.rank,
        bytes=version.num_bytes,
        kinds=list(version.summary.get("kinds", ())),
        state=figures.state(version.digest),
        tiers=figures.tiers(version.digest),
        pinned=entry.pinned and is_own,
        shared_with=list(entry.shared_with) if tenant is None or tenant == entry.tenant else [tenant],
        aliases=list(aliases),
        created=int(entry.created),
        activity=activity_card(figures.answers(entry)),
    )


def _shares(entry: CatalogEntry, figures: CardFigures) -> list[wire.RoutedAnswers]:
    """The answers of both sides of a canary; without one, nothing is counted."""
    if entry.route.canary is None:
        return []
    both = ((version.version, figures.routed(entry, version)) for version in entry.routed)
    return [wire.RoutedAnswers(number, one.in_window, one.errors) for number, one in both]


def _version_card(
    entry: CatalogEntry, version: VersionEntry, figures: CardFigures, template_rule: str
) -> wire.VersionFacts:
    counters = figures.counters(version.digest)
    known, noted = version.facts, dict(version.summary)
    traits = known.traits
    noted.pop("traits", None)
    noted.pop(KEY, None)
    template = None if known.chat_template is None else noted_template(version)
    return {
        "digest": version.digest,
        "rank": version.rank,
        "targets": noted.pop("targets", []),
        "bytes": version.num_bytes,
        "source": shown_source(version.source),
        "kinds": noted.pop("kinds", []),
        "composable": traits.is_additive,
        "invocation_tokens": list(traits.invocation_tokens),
        "eos_token_ids": list(traits.eos_token_ids),
        "probe": noted.pop("probe", None),
        "warnings": [*noted.pop("warnings", []), *([] if template is None else template.warnings(template_rule))],
        "base_fingerprint": traits.base or None,
        "chat_template": None if template is None else template.card(template_rule),
        "config": noted,
        "state": figures.state(version.digest),
        "tiers": figures.tiers(version.digest),
        "replicas": figures.replicas(version.digest),
        "activity": activity_card(figures.answers(entry, version)),
        "hits": counters.hits.get(entry.name, 0),
        "misses": counters.misses.get(entry.name, 0),
        "loads": counters.loads,
        "evictions": counters.evictions,
        "eviction_reasons": counters.eviction_reasons,
        "last_eviction": counters.last_eviction,
        "last_load_ms": round(counters.load_seconds * 1000, 3),
        "last_load": _split(counters.last_load),
    }


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
