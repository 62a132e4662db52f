"""The answer of the Responses API: one object, or its events.

Names and order of the events: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from lora_serve.server.answers.errors import WireError
from lora_serve.server.answers.json_answer import as_given
from lora_serve.server.openai.translated import Item, TranslatedBody
from lora_serve.server.schemas.answers import responses as wire
from lora_serve.server.schemas.answers.generation import TokenLogprob
from lora_serve.server.schemas.responses import ResponseFields
from lora_serve.server.schemas.tools import is_left_out

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True, kw_only=True)
class ResponseBody(TranslatedBody):
    """Items of output, numbered as they come."""

    asked: ResponseFields
    num_events: int = 0

    def begun(self) -> Iterator[wire.ResponseEvent]:
        for name in ("created", "in_progress"):
            yield self._named(name, response=self._response("in_progress", []))

    def opened(self, item: Item) -> Iterator[wire.ResponseEvent]:
        yield self._named("output_item.added", output_index=item.number, item=self._item(item, "in_progress"))
        if item.kind != "call":
            yield self._named("content_part.added", **self._place(item), part=_part(item, ""))

    def grown(self, item: Item, text: str, logprobs: list[TokenLogprob]) -> Iterator[wire.ResponseEvent]:
        yield self._of_part(item, "delta", delta=text, logprobs=logprobs if item.kind == "text" else UNSET)

    def closed(self, item: Item) -> Iterator[wire.ResponseEvent]:
        if item.kind == "call":
            yield self._of_part(item, "done", name=item.name, arguments=item.text)
        else:
            logprobs = item.logprobs if item.kind == "text" else UNSET
            yield self._of_part(item, "done", text=item.text, logprobs=logprobs)
            yield self._named("content_part.done", **self._place(item), part=_part(item, item.text))
        yield self._named("output_item.done", output_index=item.number, item=self._item(item, self._status))

    def ended(self) -> Iterator[wire.ResponseEvent]:
        if not self.items:  # the model said nothing, which is a text too
            item = Item("text", 0)
            self.items.append(item)
            yield from self.opened(item)
            yield from self.closed(item)
        yield self._named(self._status, response=self.shown())

    def shown(self) -> wire.Response:
        *whole, last = self.items
        output = [*(self._item(item, "completed") for item in whole), self._item(last, self._status)]
        return self._response(self._status, output)

    def failed(self, error: WireError) -> wire.ResponseError:
        message, number = error.message, self.num_events
        return wire.ResponseError(code=error.code, message=message, param=error.param, sequence_number=number)

    @property
    def _status(self) -> wire.Status:
        return "incomplete" if self.is_cut else "completed"

    def _named(self, name: str, /, **parts: Any) -> wire.ResponseEvent:
        self.num_events += 1
        return wire.ResponseEvent(type=f"response.{name}", sequence_number=self.num_events - 1, **parts)

    def _of_part(self, item: Item, what: str, /, **parts: Any) -> wire.ResponseEvent:
        name = "function_call_arguments" if item.kind == "call" else _PARTS[item.kind]
        return self._named(f"{name}.{what}", **self._place(item), **parts)

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"item_id": self._id(item), "output_index": item.number}
        return place if item.kind == "call" else {**place, "content_index": 0}

    def _id(self, item: Item) -> str:
        return f"{_PREFIXES[item.kind]}_{self.context.request_id}_{item.number}"

    def _item(self, item: Item, status: wire.Status) -> wire.OutputItem:
        """An item of output; while it is in progress it is empty."""
        name, is_begun = self._id(item), status == "in_progress"
        if item.kind == "call":
            return wire.FunctionCallItem(name, status, item.call_id, item.name, "" if is_begun else item.text)
        content: list[Any] = [] if is_begun else [_part(item, item.text)]
        if item.kind == "reasoning":
            return wire.ReasoningItem(id=name, status=status, content=content)
        return wire.OutputMessage(id=name, status=status, content=content)

    def _response(self, status: wire.Status, output: list[wire.OutputItem]) -> wire.Response:
        asked, reasoning = self.asked, self.asked.reasoning
        return wire.Response(
            id=self.id,
            created_at=self.created,
            status=status,
            incomplete_details=wire.IncompleteDetails() if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=as_given(asked.metadata),
            model=self.model,
            output=output,
            parallel_tool_calls=self.chat.fields.parallel_tool_calls,
            reasoning=wire.AskedReasoning(None if reasoning is None else reasoning.effort),
            temperature=self.fields.temperature,
            text=as_given(asked.text or {"format": {"type": "text"}}),
            tool_choice="auto" if asked.tool_choice is None else as_given(asked.tool_choice),
            tools=as_given([tool for tool in asked.tools or () if not is_left_out(tool)]),
            top_logprobs=asked.top_logprobs,
            top_p=self.fields.top_p,
            usage=None if status == "in_progress" else self._usage(),
            user=asked.user,
        )

    def _usage(self) -> wire.ResponseUsage:
        num_prompt_tokens, num_generated, num_cached = self.use.counts()
        return wire.ResponseUsage(
            input_tokens=num_prompt_tokens,
            input_tokens_details=wire.InputDetails(num_cached),
            output_tokens=num_generated,
            output_tokens_details=wire.OutputDetails(self.chat.choices[0].num_reasoning_tokens),
            total_tokens=num_prompt_tokens + num_generated,
        )


def _part(item: Item, text: str) -> wire.OutputPart:
    return wire.OutputText(text, [], item.logprobs if text else []) if item.kind == "text" else wire.ReasoningText(text)
