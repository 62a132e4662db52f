"""The fields that say what an answer must be -> the grammar for its rows."""

from __future__ import annotations

from lora_serve.core.adapter import AddedToken
from lora_serve.core.request import TokenGrammar
from lora_serve.server.context import RequestContext
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.schemas.structured import StructuredFields, constraint_of
from lora_serve.server.services import Services

_NAMES = frozenset(StructuredFields.model_fields)


async def requested_grammar(
    services: Services, context: RequestContext, model: ResolvedModel, fields: StructuredFields
) -> TokenGrammar | None:
    """The grammar of `response_format` and the like; None: any token may come. Raises InvalidRequestError."""
    if _NAMES.isdisjoint(fields.model_fields_set):
        return None
    constraint = constraint_of(fields)
    if constraint is None:
        return None
    adapter = model.adapters.single
    added_tokens = () if adapter is None else adapter.traits.added_tokens
    return await services.grammars.of(context.known_caller.tenant, constraint, added_tokens)


async def checked_grammar(
    services: Services, tenant: str, text: str, added_tokens: tuple[AddedToken, ...], param: str
) -> TokenGrammar:
    """A grammar in the form of `llguidance`, made from the field `param`. Raises InvalidRequestError."""
    return await services.grammars.of_text(tenant, text, param, added_tokens)
