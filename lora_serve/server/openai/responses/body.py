"""The answer of the Responses API: one object, or its events.

Names and order of the events: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lora_serve.server.answers.errors import WireError
from lora_serve.server.openai.translated import Event, Item, TranslatedBody
from lora_serve.server.schemas.responses import ResponseFields
from lora_serve.server.schemas.tools import is_left_out

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True, kw_only=True)
class ResponseBody(TranslatedBody):
    """Items of output, numbered as they come."""

    asked: ResponseFields
    num_events: int = 0

    def begun(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._named(name, response=self._response("in_progress", []))

    def opened(self, item: Item) -> Iterator[Event]:
        yield self._named("output_item.added", output_index=item.number, item=self._item(item, "in_progress"))
        if item.kind != "call":
            yield self._named("content_part.added", **self._place(item), part=_part(item, ""))

    def grown(self, item: Item, text: str, logprobs: list[Any]) -> Iterator[Event]:
        yield self._of_part(item, "delta", delta=text, **({"logprobs": logprobs} if item.kind == "text" else {}))

    def closed(self, item: Item) -> Iterator[Event]:
        if item.kind == "call":
            yield self._of_part(item, "done", name=item.name, arguments=item.text)
        else:
            logprobs = {"logprobs": item.logprobs} if item.kind == "text" else {}
            yield self._of_part(item, "done", text=item.text, **logprobs)
            yield self._named("content_part.done", **self._place(item), part=_part(item, item.text))
        yield self._named("output_item.done", output_index=item.number, item=self._item(item, self._status))

    def ended(self) -> Iterator[Event]:
        if not self.items:  # the model said nothing, which is a text too
            item = Item("text", 0)
            self.items.append(item)
            yield from self.opened(item)
            yield from self.closed(item)
        yield self._named(self._status, response=self.shown())

    def shown(self) -> dict[str, Any]:
        *whole, last = self.items
        output = [*(self._item(item, "completed") for item in whole), self._item(last, self._status)]
        return self._response(self._status, output)

    def failed(self, error: WireError) -> Event:
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return {**event, "sequence_number": self.num_events}

    @property
    def _status(self) -> str:
        return "incomplete" if self.is_cut else "completed"

    def _named(self, name: str, /, **parts: Any) -> Event:
        self.num_events += 1
        return {"type": f"response.{name}", "sequence_number": self.num_events - 1, **parts}

    def _of_part(self, item: Item, what: str, /, **parts: Any) -> Event:
        name = "function_call_arguments" if item.kind == "call" else _PARTS[item.kind]
        return self._named(f"{name}.{what}", **self._place(item), **parts)

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"item_id": self._id(item), "output_index": item.number}
        return place if item.kind == "call" else {**place, "content_index": 0}

    def _id(self, item: Item) -> str:
        return f"{_PREFIXES[item.kind]}_{self.context.request_id}_{item.number}"

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        """An item of output; while it is in progress it is empty."""
        is_begun = status == "in_progress"
        text = "" if is_begun else item.text
        shown: dict[str, Any] = {"id": self._id(item), "status": status}
        if item.kind == "call":
            call = {"call_id": item.call_id, "name": item.name, "arguments": text}
            return {"type": "function_call", **shown, **call}
        content = [] if is_begun else [_part(item, text)]
        if item.kind == "reasoning":
            return {"type": "reasoning", **shown, "summary": [], "content": content, "encrypted_content": None}
        return {"type": "message", **shown, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        assert self.context.adapters is not None, "they were resolved"
        asked, is_over = self.asked, status != "in_progress"
        reasoning = asked.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self.context.adapters.model,
            "output": output,
            "parallel_tool_calls": self.chat.fields.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "store": False,
            "temperature": self.fields.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": [tool for tool in asked.tools or () if not is_left_out(tool)],
            "top_logprobs": asked.top_logprobs,
            "top_p": self.fields.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": asked.user,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens, num_generated, num_cached = self.use.counts()
        return {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": self.chat.choices[0].num_reasoning_tokens},
            "total_tokens": num_prompt_tokens + num_generated,
        }


def _part(item: Item, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[item.kind], "text": text}
    return {**part, "annotations": [], "logprobs": item.logprobs if text else []} if item.kind == "text" else part
