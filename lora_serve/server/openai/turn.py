"""The assistant's turn in one choice of a chat, as its text is read: reasoning, content and calls of tools."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.request import FinishReason
from lora_serve.server.inference.reading import AnswerReading
from lora_serve.server.schemas.answers import generation as wire
from lora_serve.text.past_calls import CallForm, written_id
from lora_serve.text.reasoning.base import ReasoningText
from lora_serve.text.tool_calls.base import CallArguments, CallStarted, ContentText, ToolEvent

_SIGNS = re.compile(r'["\\{}\[\]]')


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


CALLED = "tool_calls"  # OpenAI's word for the end of a turn that calls tools


@dataclass(slots=True)
class Call:
    """A call as it grows."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Turn:
    """Fed with the pieces of an answer's text; gives deltas, and the whole message in the end."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self._reasoning = None if reading.reasoning is None else reading.reasoning.parser(reading.starts_inside)
        self._calls = None if reading.calls is None else reading.calls.parser(reading.tools.tools)
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._made: list[Call] = []
        self._first_call = JsonEnd()
        self.num_characters = 0

    @property
    def is_complete(self) -> bool:
        """True if nothing that follows would be shown: the model was free to call a tool, but one only, and did."""
        tools = self._reading.tools
        return self._first_call.is_reached and tools.mode == "auto" and not tools.parallel

    def anew(self) -> Turn:
        """The same turn, of which nothing was read."""
        return Turn(self._reading)

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
                self._made.append(Call(self._new_id(), name))
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
