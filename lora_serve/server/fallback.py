"""Who answers in the place of cold adapters, if the caller wants that: `on_cold` base or previous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry
from lora_serve.core.adapter import AdapterRef, AdapterTraits
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import OnCold
from lora_serve.server.adapter_choice import HEADER
from lora_serve.server.adapter_set import AdapterMember, AdapterSet
from lora_serve.server.composition import check_composition
from lora_serve.server.schemas.request import RequestFields

_BASE_TRAITS = AdapterTraits()


@dataclass(frozen=True, slots=True)
class Fallback:
    """What answers instead: no adapter, or the version before."""

    on_cold: OnCold
    adapters: AdapterSet


def fallback_for(
    fields: RequestFields,
    headers: Mapping[str, str],
    chosen: AdapterSet,
    catalog: Catalog,
    limits: AdapterConfig,
    may_use_base: bool = True,
) -> Fallback | None:
    """None: nobody. Raises InvalidRequestError if the other one would read the prompt's tokens in another way."""
    on_cold = OnCold(fields.on_cold)
    if not chosen.members or on_cold not in (OnCold.BASE, OnCold.PREVIOUS):
        return None
    if on_cold is OnCold.BASE:
        if not may_use_base:
            raise _refused("`on_cold`: this key may not use the base model. Use previous, wait or fail.")
        for member in chosen.members:
            _check_tokens(member.ref, None)
        return Fallback(on_cold, AdapterSet())
    return _previous(fields, headers, chosen, catalog, limits)


def _previous(
    fields: RequestFields, headers: Mapping[str, str], chosen: AdapterSet, catalog: Catalog, limits: AdapterConfig
) -> Fallback | None:
    if len(chosen.members) > 1:
        raise _refused("`on_cold`: previous is for one adapter; the request names several. Use base, wait or fail.")
    if "@" in _name_in(fields, headers):
        raise _refused("`on_cold`: previous needs an adapter's id without a version: what it meant before answers.")
    member = chosen.members[0]
    entry = catalog.snapshot.entries.get(member.ref.name)
    version = None if entry is None else _before(entry, member.ref)
    if entry is None or version is None:
        return None
    ref = entry.ref(version)
    _check_tokens(member.ref, ref)
    adapters = AdapterSet((AdapterMember(ref, member.scale),))
    check_composition(adapters, catalog, limits)
    return Fallback(OnCold.PREVIOUS, adapters)


def _before(entry: CatalogEntry, chosen: AdapterRef) -> VersionEntry | None:
    """A canary stands after the default version, and that one after what the id meant before."""
    before = entry.default if chosen.version != entry.default_version else entry.previous
    return None if before is None or before.digest == chosen.digest else before


def _name_in(fields: RequestFields, headers: Mapping[str, str]) -> str:
    """The one adapter as the caller named it."""
    if fields.adapters is not None:
        return fields.adapters[0].id
    return fields.adapter_id or headers.get(HEADER) or fields.model or ""


def _check_tokens(ref: AdapterRef, other: AdapterRef | None) -> None:
    own, others = ref.traits, _BASE_TRAITS if other is None else other.traits
    who = "the base model" if other is None else f"`{other.label}`"
    if (own.vocab_size, own.added_tokens) != (others.vocab_size, others.added_tokens):
        raise _refused(f"`on_cold`: {who} cannot answer for `{ref.label}`, as their vocabularies differ.")
    if own.invocation_tokens != others.invocation_tokens:
        raise _refused(f"`on_cold`: {who} cannot answer for `{ref.label}`, as their invocation tokens differ.")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="on_cold")
