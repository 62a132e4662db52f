"""The text of a chat's answer, read in the model's formats: reasoning, content and calls of tools."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import FinishReason, TokenGrammar
from lora_serve.server.background.tasks import LONG
from lora_serve.server.context import RequestContext
from lora_serve.server.inference.prompts import thread_if_long
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.schemas import generated as wire
from lora_serve.server.schemas.constraints import NO_TOOLS, StructuredFields, ToolUse, constraint_of, tool_use
from lora_serve.server.schemas.inference import ChatFields
from lora_serve.server.services import Services
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.past_calls import CallForm, written_id
from lora_serve.text.reasoning import reasoning_format
from lora_serve.text.reasoning.base import ReasoningFormat, ReasoningText
from lora_serve.text.tool_calls import tool_call_format
from lora_serve.text.tool_calls.base import (
    CallArguments,
    CallStarted,
    ContentText,
    ToolCallFormat,
    ToolEvent,
    joined_grammars,
)

_NAMES = frozenset(StructuredFields.model_fields)
# Of parameters in which a value has the wrong type.
_NO_SCHEMA = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
TAIL = 64  # tokens of the prompt's end in which reasoning may have begun
_SIGNS = re.compile(r'["\\{}\[\]]')
CALLED = "tool_calls"  # OpenAI's word for the end of a turn that calls tools


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
        answer, called = None if asked is None else asked.text, None
        ids = {marker: number for marker in reading.markers if (number := model.text.token_id(marker)) is not None}
        if calls is not None:
            called = calls.grammar(tools.callable_tools, parallel=tools.parallel, token_ids=ids)
        if reading.reasoning is None:
            return joined_grammars([text for text in (answer, called) if text is not None])
        return reading.reasoning.grammar(answer, called, starts_inside=reading.starts_inside, token_ids=ids)

    try:
        text = await asyncio.to_thread(joined)
        return await services.grammars.of_text(tenant, text, "response_format" if asked else "tools", added_tokens)
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


class JsonEnd:
    """Watches the text of one JSON object or list; `is_reached` once its last bracket came."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._skipped = -1  # place of a character behind a backslash, counted from the next piece's beginning
        self.is_reached = False

    def feed(self, piece: str) -> None:
        """Add a piece of the text."""
        if not piece:
            return
        skipped = self._skipped
        for found in _SIGNS.finditer(piece):
            if found.start() == skipped:
                continue
            sign = found.group()
            if sign == '"':
                self._is_string = not self._is_string
            elif sign == "\\":
                skipped = found.end()
            elif not self._is_string:
                self._depth += 1 if sign in "{[" else -1
                self.is_reached |= self._depth <= 0
        self._skipped = 0 if skipped == len(piece) else -1


@dataclass(slots=True)
class GrowingCall:
    """A call as it grows."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class AnswerReader:
    """Fed with the pieces of an answer's text; gives deltas, and the whole message in the end."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self._reasoning = None if reading.reasoning is None else reading.reasoning.parser(reading.starts_inside)
        self._calls = None if reading.calls is None else reading.calls.parser(reading.tools.tools)
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._made: list[GrowingCall] = []
        self._first_call = JsonEnd()
        self.num_characters = 0

    @property
    def is_complete(self) -> bool:
        """True if nothing that follows would be shown: the model was free to call a tool, but one only, and did."""
        tools = self._reading.tools
        return self._first_call.is_reached and tools.mode == "auto" and not tools.parallel

    def anew(self) -> AnswerReader:
        """A reader of the same kind that has read nothing."""
        return AnswerReader(self._reading)

    def take(self, text: str, is_last: bool) -> list[wire.Delta]:
        """The deltas that the next piece of text gives, in OpenAI's form."""
        self.num_characters += len(text)
        events: Iterable[Any] = [ContentText(text)] if text else []
        if self._reasoning is not None:
            events = self._reasoning.feed(text) + (self._reasoning.finish() if is_last else [])
        deltas = [delta for event in events for delta in self._deltas(event)]
        if is_last and self._calls is not None:
            deltas += [delta for event in self._calls.finish() for delta in self._call_deltas(event)]
        return deltas

    def message(self, prefix: str) -> wire.Message:
        """The whole message; `prefix` stands before its content."""
        content, reasoning = prefix + "".join(self._texts["content"]), "".join(self._texts["reasoning"])
        message = wire.Message(content=content or None)
        if self._made and not content.strip():
            message.content = None
        if self._reading.reasoning is not None and self._reading.shows_reasoning:
            message.reasoning_content = message.reasoning = reasoning or None
        if self._made:
            message.tool_calls = [
                wire.ToolCall(call.id, "function", wire.FunctionCall(call.name, "".join(call.arguments)))
                for call in self._made
            ]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """`reason`, or OpenAI's word for a turn that called tools. A tool that was named is no choice of the model's:
        the reason is stop then, as OpenAI and vLLM have it.
        """
        is_called = reason == FinishReason.STOP and self._made and self._reading.tools.mode != "named"
        return CALLED if is_called else reason

    def _deltas(self, event: Any) -> list[wire.Delta]:
        if isinstance(event, ReasoningText):
            self._texts["reasoning"].append(event.text)
            shown = wire.Delta(reasoning_content=event.text, reasoning=event.text)
            return [shown] if self._reading.shows_reasoning else []
        if self._calls is None:
            return self._call_deltas(event)
        return [delta for found in self._calls.feed(event.text) for delta in self._call_deltas(found)]

    def _call_deltas(self, event: ToolEvent) -> list[wire.Delta]:
        match event:
            case ContentText(text):
                self._texts["content"].append(text)
                return [wire.Delta(content=text)]
            case CallStarted(index, name) if self._may_make(index):
                self._made.append(GrowingCall(self._new_id(), name))
                function = wire.FunctionDelta(name=name, arguments="")
                call = wire.ToolCallDelta(index=index, id=self._made[-1].id, type="function", function=function)
                return [wire.Delta(tool_calls=[call])]
            case CallArguments(index, text) if self._may_make(index):
                self._made[index].arguments.append(text)
                if index == 0:
                    self._first_call.feed(text)
                return [
                    wire.Delta(
                        tool_calls=[wire.ToolCallDelta(index=index, function=wire.FunctionDelta(arguments=text))]
                    )
                ]
        return []

    def _may_make(self, index: int) -> bool:
        return index == 0 or self._reading.tools.parallel

    def _new_id(self) -> str:
        return written_id(f"call_{secrets.token_hex(12)}", CallForm(short_ids=self._reading.short_ids))
