"""An adapter's card: the catalog's facts, and the tiers that have the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from lora_serve.adapters.catalog.entry import KEY, CatalogEntry, VersionEntry, noted_template, shown_source
from lora_serve.core.stats import LoadTimes
from lora_serve.server.admin.figures import NO_FIGURES, Figures, activity_card
from lora_serve.server.answers.json_answer import as_given
from lora_serve.server.inference.defaults import metadata_warnings
from lora_serve.server.schemas.answers import adapters as wire


def adapter_card(
    entry: CatalogEntry,
    figures: Figures = NO_FIGURES,
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


def tenant_card(
    entry: CatalogEntry,
    tenant: str,
    figures: Figures = NO_FIGURES,
    aliases: Sequence[str] = (),
    defaults: dict[str, Any] | None = None,
    template_rule: str = "admin",
) -> wire.AdapterCard:
    """The card for a tenant, in the same form, with the figures that it may see. The card of a shared adapter shows no
    more than it takes to use it.
    """
    shown = entry
    if entry.tenant != tenant:
        versions = tuple(replace(version, source="") for version in entry.versions)
        shown = replace(entry, metadata={}, pinned=False, shared_with=(tenant,), versions=versions)
    own_aliases = [alias for alias in aliases if alias.startswith(f"{tenant}/")]
    return adapter_card(shown, figures, own_aliases, defaults, template_rule)


def adapter_row(entry: CatalogEntry, figures: Figures, aliases: Sequence[str], tenant: str | None) -> wire.AdapterRow:
    """The few facts that a list shows of an adapter. `tenant`: see `tenant_card`; None: all is shown."""
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


def _shares(entry: CatalogEntry, figures: Figures) -> list[wire.RoutedAnswers]:
    """The answers of both sides of a canary; without one, nothing is counted."""
    if entry.route.canary is None:
        return []
    both = ((version.version, figures.routed(entry, version)) for version in entry.routed)
    return [wire.RoutedAnswers(number, one.in_window, one.errors) for number, one in both]


def _version_card(
    entry: CatalogEntry, version: VersionEntry, figures: Figures, template_rule: str
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
