"""The adapters that a request names, those that may answer in their place, and the tokenizer that fits them.

Named are the adapters of `adapters` or `adapter_id` in the body, else of X-Adapter-Id, else of `model`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from aiohttp import web

from lora_serve.adapters.catalog.catalog import Catalog, Resolution, Selection
from lora_serve.adapters.catalog.entry import noted_template
from lora_serve.core.adapter import AdapterRef, AdapterTraits
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterNotFoundError, InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import OnCold
from lora_serve.core.tenant import Caller
from lora_serve.server.context import CONTEXT, AdapterMember, AdapterSet
from lora_serve.server.inference.defaults import NO_DEFAULTS, RequestDefaults, known_defaults
from lora_serve.server.schemas.fields import MAX_NAME_LENGTH
from lora_serve.server.schemas.inference import AdapterScale, NamingFields, RequestFields, SamplingFields
from lora_serve.server.services import SERVICES, Services
from lora_serve.text.tokenizer import TextModel

# Kinds of an adapter's card that replace a weight instead of adding a delta, so that no sum with others is defined.
REPLACING_KINDS = ("use_dora", "bias", "modules_to_save", "target_parameters", "experts", "trainable_token_indices")
HEADER = "X-Adapter-Id"
_BASE_TRAITS = AdapterTraits()
F = TypeVar("F", bound=SamplingFields)


def check_composition(adapters: AdapterSet, catalog: Catalog, limits: AdapterConfig) -> None:
    """Raises InvalidRequestError if they cannot be composed or scaled, or could never be in memory together."""
    if not adapters.is_composed:
        return
    refs = [member.ref for member in adapters.members]
    _check_distinct(refs)
    for ref in refs:
        _check_additive(ref, catalog)
    if len(refs) > 1:
        _check_fits(refs, limits)


def _check_distinct(refs: list[AdapterRef]) -> None:
    first: dict[str, AdapterRef] = {}
    for ref in refs:
        other = first.setdefault(ref.digest, ref)
        if other is not ref:
            raise _refused_set(
                f"`adapters` names {other.label!r} twice."
                if other.name == ref.name
                else f"`{ref.name}` and `{other.name}` are the same adapter: name one of them, with the scales added."
            )


def _check_additive(ref: AdapterRef, catalog: Catalog) -> None:
    if ref.traits.is_additive:
        return
    kinds = _kinds_of(ref, catalog)
    reasons = [kind for kind in kinds if kind in REPLACING_KINDS] or kinds
    raise _refused_set(
        f"The adapter `{ref.label}` cannot be composed or scaled, as it does more than add low-rank deltas "
        f"({', '.join(reasons)}); it can be used alone, with scale 1.0."
    )


def _kinds_of(ref: AdapterRef, catalog: Catalog) -> list[str]:
    """As its card shows them; empty if it was deleted just now."""
    entry = catalog.snapshot.entries.get(ref.name)
    versions = entry.versions if entry else ()
    return next((list(v.summary.get("kinds", ())) for v in versions if v.digest == ref.digest), [])


def _check_fits(refs: list[AdapterRef], limits: AdapterConfig) -> None:
    if len(refs) > limits.max_loras:
        raise _refused_set(
            f"`adapters` names {len(refs)} adapters; the device holds at most {limits.max_loras} (--max-loras)."
        )
    if limits.max_cpu_loras is not None and len(refs) > limits.max_cpu_loras:
        raise _refused_set(
            f"`adapters` names {len(refs)} adapters; host memory holds {limits.max_cpu_loras} (--max-cpu-loras)."
        )
    num_bytes = sum(ref.num_bytes for ref in refs)
    for flag, allowed in (
        ("--adapter-memory", limits.adapter_memory),
        ("--adapter-host-memory", limits.adapter_host_memory),
    ):
        if allowed is not None and num_bytes > allowed:
            raise _refused_set(f"These adapters need {num_bytes} bytes together; {flag} allows {allowed}.")


def _refused_set(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="adapters")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The adapters that a request means, with the tokenizer and the spec that their tokens ask for."""

    adapters: AdapterSet
    fallback: AdapterSet | None  # answers if `adapters` are cold; None: nothing does
    text: TextModel
    spec: ModelSpec
    defaults: RequestDefaults = NO_DEFAULTS  # of the one adapter that the request names
    hint: str = ""  # a sentence, if the adapter has a chat template of its own that is not used

    @property
    def candidates(self) -> tuple[AdapterSet, ...]:
        """The sets of adapters of which one will answer."""
        return (self.adapters,) if self.fallback is None else (self.adapters, self.fallback)

    def with_defaults(self, fields: F) -> F:
        """`fields` with the adapter's own defaults for what the request leaves out."""
        return fields if self.defaults is NO_DEFAULTS else self.defaults.applied_to(fields)


def resolve(request: web.Request, fields: RequestFields) -> ResolvedModel:
    """Resolve the names in body and header; the adapters are noted for the answer's headers.

    Raises AdapterNotFoundError, InvalidRequestError.
    """
    resolver = resolver_for(request)
    adapters = resolver.resolve(fields, request.headers)
    request[CONTEXT].adapters = adapters
    fallback = resolver.fallback(fields, adapters)
    services = request.app[SERVICES]
    text, spec = _tokenizer_for(services, adapters, resolver.caller)
    named = adapters.named
    defaults = NO_DEFAULTS if named is None else known_defaults(named.entry.metadata, services.config)
    return ResolvedModel(adapters, fallback, text, spec, defaults, _hint(services, named))


def named_tokenizer(request: web.Request, fields: NamingFields) -> tuple[TextModel, ModelSpec]:
    """The tokenizer and spec of what body and header name, and the base's if they name nothing; the adapters are noted
    for the answer's headers. Without a `user` an adapter's default version is meant: ids and texts must fit each other.
    Raises as `resolve` does.
    """
    services = request.app[SERVICES]
    if fields.model is None and _explicit(fields, request.headers) is None:
        return services.text, services.spec  # which is no secret from those who may not use the base model
    resolver = resolver_for(request)
    adapters = resolver.resolve(fields, request.headers, by_chance=False)
    request[CONTEXT].adapters = adapters
    return _tokenizer_for(services, adapters, resolver.caller)


def _hint(services: Services, named: Resolution | None) -> str:
    noted = None if named is None else noted_template(named.version)
    rule = services.adapter_config.adapter_chat_templates
    if noted is None or not noted.differs or noted.is_used(rule):
        return ""
    return f" The adapter's own chat template is not used ({noted.reason(rule)})."


def resolver_for(request: web.Request) -> AdapterResolver:
    """A resolver of the names that the caller of this request may use."""
    services = request.app[SERVICES]
    caller = request[CONTEXT].known_caller
    others = services.config.other_names
    return AdapterResolver(services.catalog, services.base_name, caller, services.adapter_limits, others)


def _tokenizer_for(services: Services, adapters: AdapterSet, caller: Caller) -> tuple[TextModel, ModelSpec]:
    """The base's tokenizer and spec, with the tokens, the vocabulary and the chat template of an adapter that brings
    its own, rendered on the caller's time; of a caller that sees all tenants, on the adapter's owner's.
    """
    adapter, named = adapters.single, adapters.named
    if adapter is None:
        return services.text, services.spec
    text, size = services.text.with_added(adapter.traits.added_tokens), adapter.traits.vocab_size
    noted = None if named is None else noted_template(named.version)
    if noted is not None and noted.is_used(services.adapter_config.adapter_chat_templates):
        tenant = caller.scope or adapter.tenant
        text = text.with_template(services.templates.of(services.text.template, noted, tenant))
    return text, replace(services.spec, vocab_size=size) if size else services.spec


@dataclass(frozen=True, slots=True)
class AdapterResolver:
    """Looks names up for one caller; an adapter that the caller may not see does not exist."""

    catalog: Catalog
    base_name: str
    caller: Caller
    limits: AdapterConfig
    other_names: frozenset[str] = frozenset()  # of the base, where no adapter has such an id

    def resolve(self, fields: NamingFields, headers: Mapping[str, str], *, by_chance: bool = True) -> AdapterSet:
        """The adapters of a request; without members the base model.

        `by_chance`: a request that names no user may be the canary's; else it gets the default version.
        Raises AdapterNotFoundError with the name as it was given, InvalidRequestError if body and header name one
        adapter and `model` another, or if the adapters cannot act together.
        """
        given = _explicit(fields, headers)
        key = self._sticky_key(fields.end_user) if fields.end_user or by_chance else None
        if given is None:
            name = self.base_name if fields.model is None else fields.model
            return self._permitted(self._set_of([(self.find(name, key), 1.0)]), fields)
        found = [(self.find(name, key), scale) for name, scale in given]
        if fields.adapters is not None and any(resolution is None for resolution, _ in found):
            message = f"`adapters` names the base model `{self.base_name}`, which is always there: leave it out."
            raise InvalidRequestError(message, param="adapters")
        adapters = self._set_of(found)
        if fields.model is not None:
            self._check_named(fields.model, given, [resolution for resolution, _ in found], key)
        check_composition(adapters, self.catalog, self.limits)
        return self._permitted(adapters, fields)

    def find(self, name: str, sticky_key: str | None = None) -> Resolution | None:
        """`name` as in `model`: the base's name (None), `base:adapter`, `adapter` or `adapter@version`.

        `sticky_key` decides between a route's default version and its canary; None: the default version.
        """
        if self._is_base(name):
            if not self.caller.may_use_base:
                raise AdapterNotFoundError(name)
            return None
        adapter_name = name.removeprefix(f"{self.base_name}:")
        try:
            return self.catalog.resolve(adapter_name, self.caller.scope, sticky_key)
        except AdapterNotFoundError:
            raise AdapterNotFoundError(name) from None

    def _is_base(self, name: str) -> bool:
        if name == self.base_name or name not in self.other_names:
            return name == self.base_name
        try:
            self.catalog.resolve(name, self.caller.scope)
        except AdapterNotFoundError:
            return True
        return False

    def fallback(self, fields: RequestFields, adapters: AdapterSet) -> AdapterSet | None:
        """The adapters that answer if the named ones are cold: no adapter, or the version before (`on_cold`).

        None: nothing answers. Raises InvalidRequestError if the prompt's tokens would mean something else to them.
        """
        on_cold = OnCold(fields.on_cold)
        if not adapters.members or on_cold not in (OnCold.BASE, OnCold.PREVIOUS):
            return None
        if on_cold is OnCold.PREVIOUS:
            return self._previous(adapters)
        if not self.caller.may_use_base:
            raise _refused("`on_cold`: this key may not use the base model. Use previous, wait or fail.")
        for member in adapters.members:
            _check_tokens(member.ref, None)
        return AdapterSet((), self.base_name)

    def _previous(self, adapters: AdapterSet) -> AdapterSet | None:
        if len(adapters.members) > 1:
            raise _refused("`on_cold`: previous is for one adapter; the request names several. Use base, wait or fail.")
        (member,) = adapters.members
        named = member.resolution
        if named is not None and named.selection is Selection.PINNED:
            raise _refused("`on_cold`: previous needs an adapter's id without a version: what it meant before answers.")
        previous = None if named is None else named.previous
        if previous is None:
            return None
        _check_tokens(member.ref, previous)
        before = AdapterSet((AdapterMember(previous, member.scale),), self.base_name)
        check_composition(before, self.catalog, self.limits)
        return before

    def _permitted(self, adapters: AdapterSet, fields: NamingFields) -> AdapterSet:
        """`adapters`, unless they come to the base model, as their scales are 0, and the caller may not use that."""
        if not self.caller.may_use_base and not any(member.scale for member in adapters.members):
            raise AdapterNotFoundError(fields.model or self.base_name)
        return adapters

    def _sticky_key(self, user: str | None) -> str:
        """The same key for all requests of one user; a request that names none has a key of its own."""
        return f"{self.caller.tenant}\0{user}" if user else uuid.uuid4().hex

    def _check_named(
        self, model: str, given: list[tuple[str, float]], found: list[Resolution | None], sticky_key: str | None
    ) -> None:
        """`model` must be the base model or one of the adapters found for the names given."""
        if self._is_base(model):
            return
        named = self.find(model, sticky_key)
        if any(_agree(named, other) for other in found):
            return
        names = ", ".join(repr(name) for name, _ in given)
        raise InvalidRequestError(
            f"`model` names {model!r} and the adapter field or header {names}: name the same adapter, or the base "
            "model.",
            param="model",
        )

    def _set_of(self, found: list[tuple[Resolution | None, float]]) -> AdapterSet:
        members = (AdapterMember(name.ref, scale, name) for name, scale in found if name is not None)
        return AdapterSet(tuple(members), self.base_name)


def _agree(one: Resolution | None, other: Resolution | None) -> bool:
    """True if two names may stand in one request: the same id, and if both name a version, the same version."""
    if one is None or other is None or one.entry.name != other.entry.name:
        return False
    return one.version.digest == other.version.digest or not (one.names_version and other.names_version)


def _explicit(fields: NamingFields, headers: Mapping[str, str]) -> list[tuple[str, float]] | None:
    """Names and scales of the body, else of the header; None if neither names an adapter."""
    if fields.adapters is not None:
        return _listed(fields.adapters, fields.adapter_id)
    if fields.adapter_id is not None:
        if not fields.adapter_id:
            raise InvalidRequestError("An adapter's id must not be empty.", param="adapter_id")
        return [(fields.adapter_id, 1.0)]
    name = headers.get(HEADER)
    if name is None:
        return None
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InvalidRequestError(f"The header {HEADER} must hold an adapter's id.", param=HEADER)
    return [(name, 1.0)]


def _listed(adapters: list[AdapterScale], adapter_id: str | None) -> list[tuple[str, float]]:
    if adapter_id is not None and [item.id for item in adapters] != [adapter_id]:
        raise InvalidRequestError("`adapters` and `adapter_id` name different adapters.", param="adapter_id")
    if not all(item.id for item in adapters):
        raise InvalidRequestError("An adapter's id must not be empty.", param="adapters")
    return [(item.id, item.scale) for item in adapters]


def _check_tokens(ref: AdapterRef, other: AdapterRef | None) -> None:
    own, others = ref.traits, _BASE_TRAITS if other is None else other.traits
    who = "the base model" if other is None else f"`{other.label}`"
    if (own.vocab_size, own.added_tokens) != (others.vocab_size, others.added_tokens):
        raise _refused(f"`on_cold`: {who} cannot answer for `{ref.label}`, as their vocabularies differ.")
    if own.invocation_tokens != others.invocation_tokens:
        raise _refused(f"`on_cold`: {who} cannot answer for `{ref.label}`, as their invocation tokens differ.")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="on_cold")
