"""The beginning that both generating APIs share: body, adapters, prompts -> requests for the engine."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.core.request import InferenceRequest
from lora_serve.server.adapter_choice import AdapterChooser
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.context import CONTEXT, Answerer, RequestContext
from lora_serve.server.fallback import fallback_for
from lora_serve.server.json_body import read_json
from lora_serve.server.openai.answer import StopRules
from lora_serve.server.sampling import Caller, Limits, requests_for
from lora_serve.server.schemas.later import refuse_later
from lora_serve.server.schemas.sampling import SamplingFields
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.tenant import Tenant


async def read_fields(request: web.Request) -> dict[str, Any]:
    """The body's fields, refused if they ask for what comes later."""
    fields = await read_json(request)
    refuse_later(fields)
    return fields


def chooser_for(request: web.Request) -> AdapterChooser:
    """What the caller of this request may see."""
    services = request.app[SERVICES]
    limits = services.limits.of(services.adapter_config)
    return AdapterChooser(services.catalog, services.base_name, tenant_of(request[CONTEXT]), limits)


def choose_adapters(request: web.Request, fields: SamplingFields) -> AdapterSet:
    """The adapters of the request, noted for the answer's headers. Raises AdapterNotFoundError, InvalidRequestError."""
    adapters = chooser_for(request).choose(fields, request.headers)
    request[CONTEXT].answerer = Answerer.of(adapters, request.app[SERVICES].base_name)
    return adapters


def make_requests(
    request: web.Request,
    fields: SamplingFields,
    limits: Limits,
    prompts: list[tuple[int, ...]],
    adapters: AdapterSet,
) -> list[InferenceRequest]:
    """`fields.n` requests for each prompt; where the adapters act, and who may answer for them, is noted.

    Raises InvalidRequestError.
    """
    services, context = request.app[SERVICES], request[CONTEXT]
    caller = Caller(
        context.request_id, tenant_of(context).name, context.started, account_of(tenant_of(context), adapters)
    )
    spec = services.spec_of(adapters.vocabulary_of)
    fallback = fallback_for(fields, request.headers, adapters, services.catalog, services.adapter_config)
    other = None if fallback is None else fallback.adapters
    requests = requests_for(fields, spec, limits, prompts, adapters, caller, other)
    context.answerer = Answerer.of(adapters, services.base_name, requests[:: fields.n])
    if fallback is not None:
        context.fallback_answerer = context.answerer.replaced_by(fallback, services.base_name)
    return requests


def account_of(tenant: Tenant, adapters: AdapterSet) -> str:
    """Whose share of the engine the request uses: whoever may use everybody's adapters acts for their owners."""
    return adapters.members[0].ref.tenant if tenant.sees_all and adapters.members else tenant.name


def tenant_of(context: RequestContext) -> Tenant:
    assert context.tenant is not None, "every route that needs a tenant stands behind a guard of middleware.py"
    return context.tenant


def stop_rules(fields: SamplingFields) -> StopRules:
    return StopRules(fields.stop, fields.include_stop_str_in_output, fields.skip_special_tokens)
