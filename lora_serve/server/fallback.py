"""Who answers in the place of cold adapters, if the caller wants that: `on_cold` base or previous."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.resolution import Selection
from lora_serve.core.adapter import AdapterRef, AdapterTraits
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import OnCold
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
    return _previous(chosen, catalog, limits)


def _previous(chosen: AdapterSet, catalog: Catalog, limits: AdapterConfig) -> Fallback | None:
    if len(chosen.members) > 1:
        raise _refused("`on_cold`: previous is for one adapter; the request names several. Use base, wait or fail.")
    (member,) = chosen.members
    named = member.resolution
    if named is not None and named.selection is Selection.PINNED:
        raise _refused("`on_cold`: previous needs an adapter's id without a version: what it meant before answers.")
    previous = None if named is None else named.previous
    if previous is None:
        return None
    _check_tokens(member.ref, previous)
    adapters = AdapterSet((AdapterMember(previous, member.scale),))
    check_composition(adapters, catalog, limits)
    return Fallback(OnCold.PREVIOUS, adapters)


def _check_tokens(ref: AdapterRef, other: AdapterRef | None) -> None:
    own, others = ref.traits, _BASE_TRAITS if other is None else other.traits
    who = "the base model" if other is None else f"`{other.label}`"
    if (own.vocab_size, own.added_tokens) != (others.vocab_size, others.added_tokens):
        raise _refused(f"`on_cold`: {who} cannot answer for `{ref.label}`, as their vocabularies differ.")
    if own.invocation_tokens != others.invocation_tokens:
        raise _refused(f"`on_cold`: {who} cannot answer for `{ref.label}`, as their invocation tokens differ.")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="on_cold")
