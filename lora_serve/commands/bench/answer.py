"""A stream's events as tokens with their times. Completions and chat, as several servers write them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_serve.commands.bench.result import Chunk, CountedBy
from lora_serve.commands.bench.token_counts import Piece, count_tokens

DONE = b"[DONE]"
AT_ONCE = 64  # events read before others have their turn, so that no other stream's clock is late by much


class StreamError(Exception):
    """A stream that is no valid answer; `kind` as in RequestRecord.error."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """The tokens and figures of the events read so far."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    total: int | None = None
    is_done: bool = False
    pieces: list[Piece] = field(default_factory=list)

    def chunks(self) -> tuple[tuple[Chunk, ...], CountedBy]:
        return count_tokens(self.pieces, self.total)

    async def read(self, events: Sequence[tuple[float, bytes]]) -> None:
        """Reads all events. Raises StreamError for an error event, for invalid JSON, and if the stream stopped early.

        Read after the last token, not in between: the load generator shares the machine's cores.
        """
        for number, (time, data) in enumerate(events, 1):
            self._event(time, data)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        if not self.pieces and not self.is_done:
            raise StreamError("bad_stream", "the answer holds no event: is it a stream?")
        if not self.is_done and self.finish_reason is None:
            raise StreamError("hang_up", "the stream ended without a reason")

    def _event(self, time: float, data: bytes) -> None:
        if data == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamError("bad_stream", f"no JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise StreamError("bad_stream", f"no object: {data[:80]!r}")
        if event.get("error") or event.get("object") == "error":
            raise StreamError("stream_error", _message(event))
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        choices = event.get("choices") or []
        if not choices:
            self.total = usage.get("completion_tokens", self.total)
        for choice in choices:
            self._choice(time, choice, usage)

    def _choice(self, time: float, choice: dict[str, Any], usage: dict[str, Any]) -> None:
        told = choice.get("delta", choice)
        text = told.get("text") or told.get("content") or told.get("reasoning_content") or told.get("reasoning") or ""
        reason = choice.get("finish_reason")
        ids = choice.get("token_ids")
        bears = bool(text) or (reason is None and "role" not in told)  # a token may have no text of its own yet
        self.text += text
        self.finish_reason = reason or self.finish_reason
        num_ids = len(ids) if isinstance(ids, list) else None
        self.pieces.append(Piece(time, bears, usage.get("completion_tokens"), num_ids))


def _message(event: dict[str, Any]) -> str:
    error = event.get("error") or event
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
