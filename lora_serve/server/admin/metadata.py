"""PATCH /admin/adapters/{id}, and the check of the metadata that says how requests are answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.admin.adapters import card_response
from lora_serve.server.admin.permissions import own_name_in
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.inference.defaults import read_defaults
from lora_serve.server.schemas.admin import MetadataFields
from lora_serve.server.services import SERVICES, Services

FORMATS = ("text", "json_object", "json_schema", "structural_tag")


async def set_metadata(request: web.Request) -> web.StreamResponse:
    """Set the adapter's metadata without a registration; requests have its defaults from now on."""
    services, name = request.app[SERVICES], own_name_in(request)
    metadata = check_fields(MetadataFields, await read_json(request)).metadata
    await check_metadata(services, metadata)
    await services.edit(lambda: services.catalog.set_metadata(name, metadata), f"describing {name}")
    return await card_response(request, name)


async def check_metadata(services: Services, metadata: Mapping[str, Any] | None) -> None:
    """Refuse defaults that no request could have. Raises InvalidRequestError naming the field."""
    defaults = read_defaults(metadata, services.config.requests)
    if defaults.response_format is not None:
        _check_format(defaults.response_format)


def _check_format(response_format: Mapping[str, Any]) -> None:
    kind = response_format.get("type")
    if kind not in FORMATS:
        raise _refused(f"its `type` must be one of {', '.join(FORMATS)}")
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if kind == "json_schema" and not isinstance(schema, Mapping):
        raise _refused('it must be {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}')


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"metadata: `response_format`: {reason}.", param="metadata.response_format")
