"""The answer of the Messages API: one message, or its events; and its errors.

Names and order of the events: https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import UnsetType

from lora_serve.core.request import FinishReason
from lora_serve.server.answers.errors import WireError
from lora_serve.server.answers.json_answer import as_given
from lora_serve.server.openai.translated import Item, TranslatedBody
from lora_serve.server.schemas.answers import responses as wire
from lora_serve.server.schemas.answers.generation import TokenLogprob

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


def anthropic_error(error: WireError, request_id: str) -> wire.AnthropicError:
    """The body of an error in Anthropic's form, with our own `param` and `code`."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    facts = wire.AnthropicErrorFacts(kind, error.message, error.param, error.code)
    return wire.AnthropicError(error=facts, request_id=request_id)


@dataclass(slots=True, kw_only=True)
class MessageBody(TranslatedBody):
    """Content blocks, numbered as they come."""

    edits: wire.AppliedEdits | UnsetType

    def begun(self) -> Iterator[wire.MessageEvent]:
        yield wire.MessageEvent(type="message_start", message=self._message([]))

    def opened(self, item: Item) -> Iterator[wire.MessageEvent]:
        yield wire.MessageEvent(type="content_block_start", index=item.number, content_block=_block(item, "", {}))

    def grown(self, item: Item, text: str, logprobs: list[TokenLogprob]) -> Iterator[wire.MessageEvent]:
        match item.kind:
            case "text":
                yield _delta(item, "text_delta", text=text)
            case "reasoning":
                yield _delta(item, "thinking_delta", thinking=text)
            case "call":
                yield _delta(item, "input_json_delta", partial_json=text)

    def closed(self, item: Item) -> Iterator[wire.MessageEvent]:
        if item.kind == "reasoning":
            yield _delta(item, "signature_delta", signature="")
        yield wire.MessageEvent(type="content_block_stop", index=item.number)

    def ended(self) -> Iterator[wire.MessageEvent]:
        stop = wire.BlockDelta(stop_reason=self._stop_reason(), stop_sequence=self._stop_sequence())
        yield wire.MessageEvent(type="message_delta", delta=stop, usage=self._usage(), context_management=self.edits)
        yield wire.MessageEvent(type="message_stop")

    def shown(self) -> wire.AnthropicMessage:
        return self._message([_block(item, item.text, _input(item)) for item in self.items])

    def failed(self, error: WireError) -> wire.AnthropicError:
        return anthropic_error(error, self.context.request_id)

    def _message(self, content: list[wire.Block]) -> wire.AnthropicMessage:
        return wire.AnthropicMessage(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=self._stop_reason(),
            stop_sequence=self._stop_sequence(),
            usage=self._usage(),
            context_management=self.edits,
        )

    def _stop_reason(self) -> wire.StopReason | None:
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

    def _usage(self) -> wire.MessageUsage:
        num_prompt_tokens, num_generated, num_cached = self.use.counts()
        return wire.MessageUsage(
            input_tokens=num_prompt_tokens - num_cached, cache_read_input_tokens=num_cached, output_tokens=num_generated
        )


def _delta(item: Item, kind: str, **part: Any) -> wire.MessageEvent:
    return wire.MessageEvent(type="content_block_delta", index=item.number, delta=wire.BlockDelta(type=kind, **part))


def _block(item: Item, text: str, arguments: dict[str, Any]) -> wire.Block:
    match item.kind:
        case "text":
            return wire.TextBlock(text)
        case "reasoning":
            return wire.ThinkingBlock(text)
        case "call":
            return wire.ToolUseBlock(item.call_id, item.name, as_given(arguments))


def _input(item: Item) -> dict[str, Any]:
    """The arguments of a call; empty if they were cut, which the message's `stop_reason` tells."""
    try:
        value = json.loads(item.text) if item.kind == "call" else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
