"""Which adapter a request is for: `adapters` or `adapter_id` in the body, else X-Adapter-Id, else `model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog import Catalog
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterNotFoundError, InvalidRequestError
from lora_serve.server.schemas.fields import MAX_NAME_LENGTH
from lora_serve.server.schemas.sampling import SamplingFields
from lora_serve.tenancy.tenant import Tenant

HEADER = "X-Adapter-Id"


@dataclass(frozen=True, slots=True)
class AdapterChooser:
    """Looks names up for one tenant; what the tenant may not see does not exist."""

    catalog: Catalog
    base_name: str
    tenant: Tenant

    def choose(self, fields: SamplingFields, headers: Mapping[str, str]) -> AdapterRef | None:
        """The adapter, or None for the base model.

        Raises AdapterNotFoundError with the name as it was given, InvalidRequestError if body and header name one
        adapter and `model` another.
        """
        explicit = _explicit_name(fields, headers)
        if explicit is None:
            return self.find(fields.model) if fields.model is not None else None
        chosen = self.find(explicit)
        if fields.model is not None:
            self._check_same(fields.model, chosen, explicit)
        return chosen

    def find(self, name: str) -> AdapterRef | None:
        """`name` as in `model`: the base's name, `base:adapter`, `adapter` or `adapter@version`."""
        if name == self.base_name:
            return None
        adapter_name = name.removeprefix(f"{self.base_name}:")
        try:
            return self.catalog.resolve(adapter_name, None if self.tenant.sees_all else self.tenant.name)
        except AdapterNotFoundError:
            raise AdapterNotFoundError(name) from None

    def _check_same(self, model: str, chosen: AdapterRef | None, explicit: str) -> None:
        if model == self.base_name:
            return
        named = self.find(model)
        same_name = named is not None and chosen is not None and named.name == chosen.name
        versions_given = "@" in model and "@" in explicit
        if not same_name or (versions_given and named != chosen):
            raise InvalidRequestError(
                f"`model` names {model!r} and the adapter field or header {explicit!r}: name one adapter only.",
                param="model",
            )


def _explicit_name(fields: SamplingFields, headers: Mapping[str, str]) -> str | None:
    listed = _listed_name(fields)
    if listed is not None and fields.adapter_id is not None and listed != fields.adapter_id:
        raise InvalidRequestError("`adapters` and `adapter_id` name different adapters.", param="adapter_id")
    name = listed if listed is not None else fields.adapter_id
    if name is None:
        name = headers.get(HEADER)
        if name is not None and (not name or len(name) > MAX_NAME_LENGTH):
            raise InvalidRequestError(f"The header {HEADER} must hold an adapter's id.", param=HEADER)
    elif not name:
        raise InvalidRequestError("An adapter's id must not be empty.", param="adapter_id")
    return name


def _listed_name(fields: SamplingFields) -> str | None:
    if fields.adapters is None:
        return None
    if len(fields.adapters) != 1 or fields.adapters[0].scale != 1.0:
        raise InvalidRequestError(
            "`adapters` must hold exactly one adapter with scale 1.0: composing and scaling adapters is not "
            "supported yet; it comes in a later version.",
            param="adapters",
        )
    return fields.adapters[0].id
