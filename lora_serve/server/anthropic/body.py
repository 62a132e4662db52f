"""The answer of the Messages API: one message, or its events; and its errors.

Names and order of the events: https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lora_serve.core.request import FinishReason
from lora_serve.server.answers.errors import WireError
from lora_serve.server.openai.translated import Event, Item, TranslatedBody

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: WireError, request_id: str) -> dict[str, Any]:
    """The body of an error in Anthropic's form, with our own `param` and `code`."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    shown = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": shown, "request_id": request_id}


@dataclass(slots=True, kw_only=True)
class MessageBody(TranslatedBody):
    """Content blocks, numbered as they come."""

    edits: dict[str, Any]  # `context_management` of the answer, where the request has one

    def begun(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message([])}

    def opened(self, item: Item) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": item.number, "content_block": _block(item, "", {})}

    def grown(self, item: Item, text: str, logprobs: list[Any]) -> Iterator[Event]:
        match item.kind:
            case "text":
                yield _delta(item, "text_delta", text=text)
            case "reasoning":
                yield _delta(item, "thinking_delta", thinking=text)
            case "call":
                yield _delta(item, "input_json_delta", partial_json=text)

    def closed(self, item: Item) -> Iterator[Event]:
        if item.kind == "reasoning":
            yield _delta(item, "signature_delta", signature="")
        yield {"type": "content_block_stop", "index": item.number}

    def ended(self) -> Iterator[Event]:
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        yield {"type": "message_delta", "delta": stop, "usage": self._usage(), **self.edits}
        yield {"type": "message_stop"}

    def shown(self) -> dict[str, Any]:
        return self._message([_block(item, item.text, _input(item)) for item in self.items])

    def failed(self, error: WireError) -> Event:
        return anthropic_error(error, self.context.request_id)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        assert self.context.adapters is not None, "they were resolved"
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.context.adapters.model,
            "content": content,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "usage": self._usage(),
            **self.edits,
        }

    def _stop_reason(self) -> str | None:
        """In Anthropic's words; None: the answer has not ended."""
        if self.finish_reason is None:
            return None
        if self.finish_reason == FinishReason.LENGTH:
            return "max_tokens"
        if any(item.kind == "call" for item in self.items):
            return "tool_use"
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"

    def _stop_sequence(self) -> str | None:
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens, num_generated, num_cached = self.use.counts()
        return {
            "input_tokens": num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_generated,
        }


def _delta(item: Item, kind: str, **parts: Any) -> Event:
    return {"type": "content_block_delta", "index": item.number, "delta": {"type": kind, **parts}}


def _block(item: Item, text: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match item.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": arguments}


def _input(item: Item) -> dict[str, Any]:
    """The arguments of a call; empty if they were cut, which the message's `stop_reason` tells."""
    try:
        value = json.loads(item.text) if item.kind == "call" else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
