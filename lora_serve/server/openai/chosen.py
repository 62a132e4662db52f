"""The beginning that all inference APIs share: body, adapters, prompts -> requests for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from lora_serve.core.request import InferenceRequest
from lora_serve.core.tenant import Caller
from lora_serve.server.adapter_choice import AdapterChooser
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.bodies.json_body import read_json
from lora_serve.server.context import CONTEXT, Answerer, RequestContext
from lora_serve.server.fallback import Fallback, fallback_for
from lora_serve.server.openai.answer import StopRules
from lora_serve.server.sampling import Limits, Sender, requests_for
from lora_serve.server.schemas.later import refuse_later
from lora_serve.server.schemas.request import RequestFields
from lora_serve.server.schemas.sampling import SamplingFields
from lora_serve.server.services import SERVICES


async def read_fields(request: web.Request) -> dict[str, Any]:
    """The body's fields, refused if they ask for what comes later."""
    fields = await read_json(request)
    refuse_later(fields)
    return fields


def chooser_for(request: web.Request) -> AdapterChooser:
    """What the caller of this request may see."""
    services = request.app[SERVICES]
    limits = services.limits.of(services.adapter_config)
    return AdapterChooser(services.catalog, services.base_name, caller_of(request[CONTEXT]), limits)


def choose_adapters(request: web.Request, fields: RequestFields) -> AdapterSet:
    """The adapters of the request, noted for the answer's headers. Raises AdapterNotFoundError, InvalidRequestError."""
    adapters = chooser_for(request).choose(fields, request.headers)
    request[CONTEXT].answerer = Answerer.of(adapters, request.app[SERVICES].base_name)
    return adapters


def choose_fallback(request: web.Request, fields: RequestFields, adapters: AdapterSet) -> Fallback | None:
    """Who answers if the adapters are cold; None: nobody. Raises InvalidRequestError."""
    services = request.app[SERVICES]
    may_use_base = caller_of(request[CONTEXT]).may_use_base
    return fallback_for(fields, adapters, services.catalog, services.adapter_config, may_use_base)


def sender_of(request: web.Request, adapters: AdapterSet) -> Sender:
    """Whose requests the engine gets."""
    context = request[CONTEXT]
    caller = caller_of(context)
    account = account_of(caller, adapters)
    return Sender(context.request_id, caller.tenant, context.started, account, caller.cache_scope)


def note_answerers(
    request: web.Request, adapters: AdapterSet, fallback: Fallback | None, requests: Sequence[InferenceRequest]
) -> None:
    """For the answer's headers: where the adapters act, and who may answer for them. One request for each prompt."""
    context, base_name = request[CONTEXT], request.app[SERVICES].base_name
    context.answerer = Answerer.of(adapters, base_name, requests)
    if fallback is not None:
        context.fallback_answerer = context.answerer.replaced_by(fallback, base_name)


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
    spec = request.app[SERVICES].spec_of(adapters.vocabulary_of)
    fallback = choose_fallback(request, fields, adapters)
    other = None if fallback is None else fallback.adapters
    requests = requests_for(fields, spec, limits, prompts, adapters, sender_of(request, adapters), other)
    note_answerers(request, adapters, fallback, requests[:: fields.n])
    return requests


def account_of(caller: Caller, adapters: AdapterSet) -> str:
    """Whose share of the engine the request uses: whoever may use everybody's adapters acts for their owners."""
    return adapters.members[0].ref.tenant if caller.sees_all and adapters.members else caller.tenant


def caller_of(context: RequestContext) -> Caller:
    assert context.caller is not None, "every route that needs a caller stands behind a guard of middleware.py"
    return context.caller


def stop_rules(fields: SamplingFields) -> StopRules:
    return StopRules(fields.stop, fields.include_stop_str_in_output, fields.skip_special_tokens)
