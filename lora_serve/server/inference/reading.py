"""The way in which the text of a chat's answer is read: reasoning and calls of tools, each in the model's format.

A format is the adapter's own, else the one that the settings name, else the one that the chat template shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import TokenGrammar
from lora_serve.server.background.tasks import LONG
from lora_serve.server.context import RequestContext
from lora_serve.server.inference.prompts import thread_if_long
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.schemas.generation import ChatFields
from lora_serve.server.schemas.structured import StructuredFields, constraint_of
from lora_serve.server.schemas.tools import NO_TOOLS, ToolUse, tool_use
from lora_serve.server.services import Services
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.reasoning import reasoning_format
from lora_serve.text.reasoning.base import ReasoningFormat
from lora_serve.text.tool_calls import tool_call_format
from lora_serve.text.tool_calls.base import ToolCallFormat, joined_grammars

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


_NO_SCHEMA = (
    AttributeError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)  # of parameters in which a value has the wrong type
TAIL = 64  # tokens of the prompt's end in which reasoning may have begun


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """The formats of one answer; None: nothing of that kind is looked for."""

    tools: ToolUse
    calls: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    starts_inside: bool = False  # the prompt has begun the reasoning
    shows_reasoning: bool = True
    short_ids: bool = False  # of calls, see `ToolForms`

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens that must stay in the text until it is read."""
        formats = [found for found in (self.reasoning, self.calls) if found is not None]
        return tuple(marker for found in formats for marker in found.markers)


async def asked_tools(fields: ChatFields) -> ToolUse:
    """Check the tools of a request. Raises InvalidRequestError."""
    if fields.tools is None and fields.tool_choice is None:
        return NO_TOOLS
    return await thread_if_long(
        amount_of((fields.tools, fields.tool_choice)),
        lambda: tool_use(fields.tools, fields.tool_choice, fields.parallel_tool_calls),
    )


def answer_reading(
    services: Services, model: ResolvedModel, fields: ChatFields, tools: ToolUse, prompt: Sequence[int]
) -> AnswerReading | None:
    """The reading of an answer to `prompt`; None if its text is the content. Raises InvalidRequestError."""
    reasoning = _reasoning_format(services, model)
    calls = None if tools.mode == "none" else _call_format(services, model)
    if reasoning is None and calls is None:
        return None
    text = model.text
    starts_inside = reasoning is not None and reasoning.is_open_after(text.decode(prompt[-TAIL:], False))
    short_ids = calls is not None and text.template.tool_forms.short_ids
    return AnswerReading(tools, calls, reasoning, starts_inside, fields.include_reasoning, short_ids)


async def read_grammar(
    services: Services, tenant: str, model: ResolvedModel, reading: AnswerReading, asked: TokenGrammar | None
) -> TokenGrammar | None:
    """The grammar of an answer that is read: what was asked for (`response_format`), or calls, after the reasoning.

    Raises InvalidRequestError.
    """
    tools, calls = reading.tools, reading.calls
    if asked is None and not tools.is_forced:
        return None
    if asked is not None and tools.is_forced:
        message = "`tool_choice`: an answer that must be a call cannot have a `response_format` too: leave one out."
        raise InvalidRequestError(message, param="tool_choice")
    adapter = model.adapters.single
    added_tokens = () if adapter is None else adapter.traits.added_tokens

    def joined() -> str:
        texts = [] if asked is None else [asked.text]
        ids = {marker: number for marker in reading.markers if (number := model.text.token_id(marker)) is not None}
        if calls is not None:
            texts.append(calls.grammar(tools.callable_tools, parallel=tools.parallel, token_ids=ids))
        if reading.reasoning is None:
            return joined_grammars(texts)
        return reading.reasoning.grammar(texts, starts_inside=reading.starts_inside, token_ids=ids)

    try:
        text = await asyncio.to_thread(joined)
        return await checked_grammar(services, tenant, text, added_tokens, "response_format" if asked else "tools")
    except (InvalidRequestError, *_NO_SCHEMA):
        if calls is not None:
            await _check_parameters(services, tenant, tools)
        raise


async def _check_parameters(services: Services, tenant: str, tools: ToolUse) -> None:
    """Raises InvalidRequestError for the first tool whose parameters no grammar can hold, with the place in them."""
    for tool in tools.callable_tools:
        try:
            await services.grammars.of(tenant, Constraint(ConstraintKind.JSON, dict(tool.parameters), "parameters"))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"`tools`: {tool.name}: {error}", param="tools") from error


def amount_of(value: Any) -> int:
    """Characters and values in a value of JSON, in the units of LONG; counted no further than a little above LONG."""
    amount, waiting = 0, [value]
    while waiting and amount <= LONG:
        item = waiting.pop()
        if isinstance(item, str):
            amount += len(item)
        elif isinstance(item, Mapping | list | tuple):
            amount += 10 + 10 * len(item)
            if amount <= LONG:
                waiting.extend(item.values() if isinstance(item, Mapping) else item)
    return amount


def _call_format(services: Services, model: ResolvedModel) -> ToolCallFormat:
    name = model.defaults.tool_call_parser or services.config.tool_call_parser
    found = model.text.template.call_format if name == "auto" else None if name == "none" else tool_call_format(name)
    if found is None:
        raise InvalidRequestError(
            "No format of tool calls is known for this model: its chat template shows none. Whoever runs the server "
            "names it with --tool-call-parser, whoever registers an adapter with `tool_call_parser` in its metadata.",
            param="tools",
        )
    return found


def _reasoning_format(services: Services, model: ResolvedModel) -> ReasoningFormat | None:
    name = model.defaults.reasoning_parser or services.config.reasoning_parser
    return (
        model.text.template.reasoning_format if name == "auto" else None if name == "none" else reasoning_format(name)
    )
