"""The figures of one moment that cards and lists of adapters show to one caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry
from lora_serve.core.adapter import AdapterState
from lora_serve.core.errors import LoraServeError
from lora_serve.core.stats import AdapterCounters, EngineStats
from lora_serve.core.tenant import Caller
from lora_serve.server.fleet import places_of
from lora_serve.server.schemas.answers.adapters import ActivityCard, AdapterPlace
from lora_serve.server.services import Services
from lora_serve.server.telemetry.activity import NO_ANSWERS, WINDOW, Activity, Answers


def _nowhere(digest: str) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Figures:
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


NO_FIGURES = Figures()


def figures_of(
    stats: EngineStats | None, places: Callable[[str], tuple[str, ...]] = _nowhere, activity: Activity | None = None
) -> Figures:
    """All figures, for a caller who sees all."""
    if stats is None:
        return Figures(None, places, activity)
    on_device = frozenset(slot.digest for slot in stats.slots)
    on_host, loading = frozenset(stats.host_digests), frozenset(stats.loading_digests)
    return Figures(stats, places, activity, on_device=on_device, on_host=on_host, loading=loading)


async def figures_for(services: Services, caller: Caller) -> Figures:
    """The figures of this moment as the caller may see them. An engine that cannot answer takes its own away only."""
    if caller.scope is not None:
        return Figures(activity=services.activity, tenant=caller.scope, since=caller.since)
    try:
        stats = await services.client.stats()
    except LoraServeError:
        stats = None
    return figures_of(stats, cache(services.places_of), services.activity)


def activity_card(answers: Answers) -> ActivityCard:
    """The answers as cards and lists show them."""
    last_used = None if answers.last_used is None else int(answers.last_used)
    return ActivityCard(answers.per_minute, last_used, WINDOW, answers.in_window, answers.errors)
