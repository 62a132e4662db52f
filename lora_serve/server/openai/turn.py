"""The assistant's turn in one choice of a chat, as its text is read: content and calls of tools."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.request import FinishReason
from lora_serve.server.inference.reading import AnswerReading
from lora_serve.text.past_calls import CallForm, written_id
from lora_serve.text.tool_calls.base import CallArguments, CallStarted, ContentText, ToolEvent

CALLED = "tool_calls"  # OpenAI's word for the end of a turn that calls tools
Delta = dict[str, Any]


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
        self._parser = reading.calls.parser(reading.tools.tools)
        self._content: list[str] = []
        self._made: list[Call] = []
        self.num_characters = 0

    def take(self, text: str, is_last: bool) -> list[Delta]:
        """The deltas that the next piece of text gives, in OpenAI's form."""
        self.num_characters += len(text)
        events = self._parser.feed(text) if text else []
        events = events + self._parser.finish() if is_last else events
        return [delta for event in events for delta in self._deltas(event)]

    def message(self, prefix: str) -> dict[str, Any]:
        """The whole message; `prefix` stands before its content."""
        content = prefix + "".join(self._content)
        if not self._made:
            return {"role": "assistant", "content": content}
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in self._made
        ]
        return {"role": "assistant", "content": content if content.strip() else None, "tool_calls": calls}

    def finish_reason(self, reason: str | None) -> str | None:
        """`reason`, or OpenAI's word for a turn that called tools. A tool that was named is no choice of the model's:
        the reason is stop then, as OpenAI and vLLM have it.
        """
        is_called = reason == FinishReason.STOP and self._made and self._reading.tools.mode != "named"
        return CALLED if is_called else reason

    def _deltas(self, event: ToolEvent) -> list[Delta]:
        match event:
            case ContentText(text):
                self._content.append(text)
                return [{"content": text}]
            case CallStarted(index, name) if self._may_make(index):
                self._made.append(Call(self._new_id(), name))
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._made[-1].id, "type": "function", "function": function}
                return [{"tool_calls": [call]}]
            case CallArguments(index, text) if self._may_make(index):
                self._made[index].arguments.append(text)
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
        return []

    def _may_make(self, index: int) -> bool:
        return index == 0 or self._reading.tools.parallel

    def _new_id(self) -> str:
        return written_id(f"call_{secrets.token_hex(12)}", CallForm(short_ids=self._reading.short_ids))
