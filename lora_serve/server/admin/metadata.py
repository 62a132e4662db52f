"""PATCH /admin/adapters/{id}, and the check of the metadata that says how requests are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.tenant import Caller
from lora_serve.server.admin.adapters import card_response
from lora_serve.server.admin.permissions import own_name_in
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.defaults import read_defaults
from lora_serve.server.schemas.admin import MetadataFields
from lora_serve.server.schemas.structured import StructuredFields, constraint_of
from lora_serve.server.services import SERVICES, Services
from lora_serve.text import reasoning, tool_calls


async def set_metadata(request: web.Request) -> web.StreamResponse:
    """Set an adapter's metadata without a registration.

    Requests have its defaults from now on.
    """
    services, name = request.app[SERVICES], own_name_in(request)
    metadata = check_fields(MetadataFields, await read_json(request)).metadata
    await check_metadata(services, request[CONTEXT].known_caller, metadata)
    await services.edit(lambda: services.catalog.set_metadata(name, metadata), f"describing {name}")
    return await card_response(request, name)


async def check_metadata(services: Services, caller: Caller, metadata: Mapping[str, Any] | None) -> None:
    """Refuse defaults that no request could have. Raises InvalidRequestError naming the field, RateLimitedError."""
    defaults = read_defaults(metadata, services.config)
    _check_parser("tool_call_parser", defaults.tool_call_parser, tool_calls.names())
    _check_parser("reasoning_parser", defaults.reasoning_parser, reasoning.names())
    if defaults.response_format is None:
        return
    try:
        constraint = constraint_of(StructuredFields(response_format=defaults.response_format))
        if constraint is not None:
            await services.grammars.of(caller.tenant, constraint)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"metadata: {error}", param=f"metadata.{error.param}") from None


def _check_parser(field: str, name: str | None, known: Sequence[str]) -> None:
    allowed = ("auto", "none", *known)
    if name is not None and name not in allowed:
        message = f"metadata: `{field}`: there is no {name!r}; there are {', '.join(allowed)}."
        raise InvalidRequestError(message, param=f"metadata.{field}")
