"""A stream's events as tokens with their times. Completions and chat, as several servers write them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_serve.commands.bench.result import Chunk, CountedBy

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


class EventStream:
    """An incremental parser; only `data` fields count, other fields and comments are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, read: bytes) -> list[bytes]:
        """The data of the events that are complete now."""
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> bytes | None:
        if not line and self._data:
            event, self._data = b"\n".join(self._data), []
            return event
        if line.startswith(b"data:"):
            self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
        return None


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event."""

    time: float
    bears_content: bool
    total: int | None = None  # completion tokens until now
    num_ids: int | None = None


def count_tokens(pieces: Sequence[Piece], total: int | None) -> tuple[tuple[Chunk, ...], CountedBy]:
    """Arrivals with one token at least, in order. `total`: of the usage that came alone, after the choices."""
    counts, counted_by = _counts(pieces, total)
    arrivals = itertools.groupby(zip(pieces, counts, strict=True), key=lambda pair: pair[0].time)
    sums = (Chunk(time, sum(count for _, count in group)) for time, group in arrivals)
    return tuple(chunk for chunk in sums if chunk.num_tokens), counted_by


def _counts(pieces: Sequence[Piece], total: int | None) -> tuple[list[int], CountedBy]:
    first = next((piece for piece in pieces if piece.bears_content), None)
    if first is not None and first.total is not None:
        known = itertools.accumulate((piece.total or 0 for piece in pieces), max, initial=0)
        return [later - earlier for earlier, later in itertools.pairwise(known)], "continuous"
    if any(piece.num_ids is not None for piece in pieces):
        return [piece.num_ids or 0 for piece in pieces], "ids"
    bearing = [piece.bears_content for piece in pieces]
    if total is None and pieces:
        total = pieces[-1].total  # some servers count once, in the last chunk of the choice
    if total is None:
        return [int(bears) for bears in bearing], "chunks"
    if pieces and not any(bearing):
        bearing[-1] = True  # all of it came at the end, and none of it is text
    shares = iter(_spread(total, sum(bearing)))
    return [next(shares) if bears else 0 for bears in bearing], "usage"


def _spread(total: int, places: int) -> list[int]:
    """Spreads `total` evenly in whole numbers; the first place gets at least one."""
    borders = [-(-place * total // max(1, places)) for place in range(places + 1)]
    return [later - earlier for earlier, later in itertools.pairwise(borders)]
