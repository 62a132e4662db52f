"""Which adapters a request is for: `adapters` or `adapter_id` in the body, else X-Adapter-Id, else `model`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.resolution import Resolution
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterNotFoundError, InvalidRequestError
from lora_serve.core.tenant import Caller
from lora_serve.server.adapter_set import AdapterMember, AdapterSet
from lora_serve.server.composition import check_composition
from lora_serve.server.schemas.fields import MAX_NAME_LENGTH
from lora_serve.server.schemas.request import AdapterScale, RequestFields

HEADER = "X-Adapter-Id"


@dataclass(frozen=True, slots=True)
class AdapterChooser:
    """Looks names up for one caller; what the caller may not see does not exist."""

    catalog: Catalog
    base_name: str
    caller: Caller
    limits: AdapterConfig

    def choose(self, fields: RequestFields, headers: Mapping[str, str]) -> AdapterSet:
        """The adapters; none of them is the base model.

        Raises AdapterNotFoundError with the name as it was given, InvalidRequestError if body and header name one
        adapter and `model` another, or if the adapters cannot act together.
        """
        named, key = _explicit(fields, headers), self._sticky_key(fields.user)
        if named is None:
            return self._permitted(
                _set_of([(self.find(self.base_name if fields.model is None else fields.model, key), 1.0)]), fields
            )
        found = [(self.find(name, key), scale) for name, scale in named]
        if fields.adapters is not None and any(resolution is None for resolution, _ in found):
            message = f"`adapters` names the base model `{self.base_name}`, which is always there: leave it out."
            raise InvalidRequestError(message, param="adapters")
        chosen = _set_of(found)
        if fields.model is not None:
            self._check_named(fields.model, named, [resolution for resolution, _ in found], key)
        check_composition(chosen, self.catalog, self.limits)
        return self._permitted(chosen, fields)

    def find(self, name: str, sticky_key: str | None = None) -> Resolution | None:
        """`name` as in `model`: the base's name, `base:adapter`, `adapter` or `adapter@version`.

        `sticky_key`: whose request it is, for the canary; None: the default version.
        """
        if name == self.base_name:
            if not self.caller.may_use_base:
                raise AdapterNotFoundError(name)
            return None
        adapter_name = name.removeprefix(f"{self.base_name}:")
        try:
            return self.catalog.resolve(adapter_name, self.caller.scope, sticky_key)
        except AdapterNotFoundError:
            raise AdapterNotFoundError(name) from None

    def _permitted(self, chosen: AdapterSet, fields: RequestFields) -> AdapterSet:
        """`chosen`, unless it is the base model in disguise and the caller may not use that."""
        if not self.caller.may_use_base and not any(member.scale for member in chosen.members):
            raise AdapterNotFoundError(fields.model or self.base_name)
        return chosen

    def _sticky_key(self, user: str | None) -> str:
        """The same for all requests of one user; a request that names none stands for itself."""
        return f"{self.caller.tenant}\0{user}" if user else uuid.uuid4().hex

    def _check_named(
        self, model: str, given: list[tuple[str, float]], found: list[Resolution | None], sticky_key: str
    ) -> None:
        """`model` must be the base model or one of the adapters found for the names given."""
        if model == self.base_name:
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


def _agree(one: Resolution | None, other: Resolution | None) -> bool:
    """Whether two names may stand in one request: the same id, and if both name a version, the same version."""
    if one is None or other is None or one.entry.name != other.entry.name:
        return False
    return one.version.digest == other.version.digest or not (one.names_version and other.names_version)


def _set_of(found: list[tuple[Resolution | None, float]]) -> AdapterSet:
    return AdapterSet(tuple(AdapterMember(name.ref, scale, name) for name, scale in found if name is not None))


def _explicit(fields: RequestFields, headers: Mapping[str, str]) -> list[tuple[str, float]] | None:
    """Names and scales of the body, else of the header; None: neither."""
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
