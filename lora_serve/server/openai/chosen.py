"""The beginning that both generating APIs share: body, adapter, prompt -> requests for the engine."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.core.adapter import AdapterRef
from lora_serve.server.adapter_choice import AdapterChooser
from lora_serve.server.context import CONTEXT, Answerer, RequestContext
from lora_serve.server.json_body import read_json
from lora_serve.server.openai.answer import StopRules
from lora_serve.server.sampling import Caller
from lora_serve.server.schemas.later import refuse_later
from lora_serve.server.schemas.sampling import SamplingFields
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.tenant import Tenant


async def read_fields(request: web.Request) -> dict[str, Any]:
    """The body's fields, refused if they ask for what comes later."""
    fields = await read_json(request)
    refuse_later(fields)
    return fields


def choose_adapter(request: web.Request, fields: SamplingFields) -> AdapterRef | None:
    """The adapter of the request, noted for the answer's headers. Raises AdapterNotFoundError."""
    services, context = request.app[SERVICES], request[CONTEXT]
    chooser = AdapterChooser(services.catalog, services.base_name, tenant_of(context))
    adapter = chooser.choose(fields, request.headers)
    context.answerer = Answerer.of(adapter, services.base_name)
    return adapter


def tenant_of(context: RequestContext) -> Tenant:
    assert context.tenant is not None, "every route that needs a tenant stands behind a guard of middleware.py"
    return context.tenant


def caller_of(context: RequestContext) -> Caller:
    return Caller(context.request_id, tenant_of(context).name, context.started)


def stop_rules(fields: SamplingFields) -> StopRules:
    return StopRules(fields.stop, fields.include_stop_str_in_output, fields.skip_special_tokens)


def model_name(services: Services, adapter: AdapterRef | None) -> str:
    """`model` of the answer."""
    return services.base_name if adapter is None else adapter.name
