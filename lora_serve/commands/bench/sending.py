"""Sends one planned request and reads its stream: tokens with their times, as several servers write them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lora_serve.commands.bench.report import Chunk, CountedBy, RequestRecord
from lora_serve.commands.bench.workload import PlannedRequest, Target

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock of seconds since a load began."""

    origin: float = field(default_factory=time.perf_counter)

    def now(self) -> float:
        return time.perf_counter() - self.origin


def open_session() -> aiohttp.ClientSession:
    """An HTTP session with as many kept-alive connections as requests; only a request's own timeout ends one."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), trust_env=False
    )


async def send(
    http: aiohttp.ClientSession, target: Target, request: PlannedRequest, index: int, clock: Clock
) -> RequestRecord:
    """Sends the request and returns its record, which names what went wrong. Raises only CancelledError."""
    body = json.dumps(request_body(target, request, index)).encode()
    headers = request_headers(target, request)
    answer, events, error, detail = StreamedAnswer(), list[tuple[float, bytes]](), None, ""
    sent = clock.now()
    try:
        async with asyncio.timeout(target.timeout):
            await _receive(http, target.root + PATHS[target.endpoint], body, headers, clock, events)
    except TimeoutError:
        error, detail = "timeout", f"no whole answer after {target.timeout:g} s"
    except StreamError as refused:
        error, detail = refused.kind, str(refused)
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as broken:
        error, detail = "hang_up", str(broken)
    except (aiohttp.ClientError, OSError) as lost:
        error, detail = "connection", str(lost)
    ended = clock.now()
    try:
        await answer.read(events)
    except StreamError as wrong:
        error, detail = (error, detail) if error else (wrong.kind, str(wrong))
    chunks, counted_by = answer.chunks()
    if error is None and not chunks:
        error, detail = "empty", "the answer has no token"
    return RequestRecord(
        index=index,
        adapter=request.adapter,
        prompt_tokens=answer.prompt_tokens or request.prompt_tokens,
        asked_tokens=request.output_tokens,
        planned=sent if request.at is None else request.at,
        sent=sent,
        ended=ended,
        chunks=chunks,
        counted_by=counted_by,
        text=answer.text,
        finish_reason=answer.finish_reason,
        error=error,
        detail=detail,
    )


async def _receive(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: dict[str, str],
    clock: Clock,
    events: list[tuple[float, bytes]],
) -> None:
    """Adds events with the time of the read that completed them. Raises StreamError for a refusal."""
    stream = EventStream()
    async with http.post(url, data=body, headers=headers) as response:
        if response.status != 200:
            raise StreamError(f"http_{response.status}", (await response.text(errors="replace"))[:300])
        async for read in response.content.iter_any():
            now = clock.now()
            events.extend((now, event) for event in stream.feed(read))


def request_headers(target: Target, request: PlannedRequest) -> dict[str, str]:
    headers = {"Content-Type": "application/json", **target.headers}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    if target.adapter_field == "header" and request.adapter is not None:
        headers["X-Adapter-Id"] = request.adapter
    return headers


def request_body(target: Target, request: PlannedRequest, index: int = 0) -> dict[str, Any]:
    """The body of a greedy, streamed request, the `index`th. Raises ValueError for token ids on the chat endpoint."""
    body: dict[str, Any] = {"model": target.model, **_prompt(target, request), "max_tokens": request.output_tokens}
    body |= {"temperature": 0, "stream": True, **_adapter(target, request.adapter)}
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.usage != "none":
        body["stream_options"] = {"include_usage": True}
    if target.usage == "continuous":
        body["stream_options"]["continuous_usage_stats"] = True
    if target.response_formats:
        body["response_format"] = target.response_formats[index % len(target.response_formats)]
    return body | dict(target.extra_body)


def _prompt(target: Target, request: PlannedRequest) -> dict[str, Any]:
    if target.endpoint == "completions":
        return {"prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt)}
    if not isinstance(request.prompt, str):
        raise ValueError("chat takes text, not token ids")
    return {"messages": [{"role": "user", "content": request.prompt}]}


def _adapter(target: Target, adapter: str | None) -> dict[str, Any]:
    if target.adapter_field == "llama-cpp":
        none = {"id": 0, "scale": 0.0}  # an empty list would mean the server's own default: all of them
        return {"lora": [none if adapter is None else {"id": _number(target, adapter), "scale": 1.0}]}
    if adapter is None or target.adapter_field == "header":
        return {}
    return {target.adapter_field: adapter}


def _number(target: Target, adapter: str) -> int:
    return target.adapter_ids[adapter] if adapter in target.adapter_ids else int(adapter)


DONE = b"[DONE]"
_TEXTS = ("text", "content", "reasoning_content", "reasoning")  # fields of a chunk
AT_ONCE = 64  # events read before others have their turn, so that no other stream's clock is late by much


class StreamError(Exception):
    """A stream that is no valid answer; `kind` as in RequestRecord.error."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True)
class StreamedAnswer:
    """The tokens and figures of the events read so far."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    total: int | None = None
    is_done: bool = False
    deltas: list[ChoiceDelta] = field(default_factory=list)

    def chunks(self) -> tuple[tuple[Chunk, ...], CountedBy]:
        return count_tokens(self.deltas, self.total)

    async def read(self, events: Sequence[tuple[float, bytes]]) -> None:
        """Reads all events. Raises StreamError for an error event, for invalid JSON, and if the stream stopped early.

        Read after the last token, not in between: the load generator shares the machine's cores.
        """
        for number, (moment, data) in enumerate(events, 1):
            self._event(moment, data)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        if not self.deltas and not self.is_done:
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
        delta = choice.get("delta", choice)
        text = next((delta[name] for name in _TEXTS if delta.get(name)), "")
        reason = choice.get("finish_reason")
        ids = choice.get("token_ids")
        bears = bool(text) or (reason is None and "role" not in delta)  # a token may have no text of its own yet
        self.text += text
        self.finish_reason = reason or self.finish_reason
        num_ids = len(ids) if isinstance(ids, list) else None
        self.deltas.append(ChoiceDelta(time, bears, usage.get("completion_tokens"), num_ids))


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
class ChoiceDelta:
    time: float
    bears_content: bool
    total: int | None = None  # completion tokens until now
    num_ids: int | None = None


def count_tokens(deltas: Sequence[ChoiceDelta], total: int | None) -> tuple[tuple[Chunk, ...], CountedBy]:
    """Arrivals with one token at least, in order. `total`: of the usage that came alone, after the choices."""
    counts, counted_by = _counts(deltas, total)
    arrivals = itertools.groupby(zip(deltas, counts, strict=True), key=lambda pair: pair[0].time)
    sums = (Chunk(time, sum(count for _, count in group)) for time, group in arrivals)
    return tuple(chunk for chunk in sums if chunk.num_tokens), counted_by


def _counts(deltas: Sequence[ChoiceDelta], total: int | None) -> tuple[list[int], CountedBy]:
    first = next((delta for delta in deltas if delta.bears_content), None)
    if first is not None and first.total is not None:
        known = itertools.accumulate((delta.total or 0 for delta in deltas), max, initial=0)
        return [later - earlier for earlier, later in itertools.pairwise(known)], "continuous"
    if any(delta.num_ids is not None for delta in deltas):
        return [delta.num_ids or 0 for delta in deltas], "ids"
    bearing = [delta.bears_content for delta in deltas]
    if total is None and deltas:
        total = deltas[-1].total  # some servers count once, in the last chunk of the choice
    if total is None:
        return [int(bears) for bears in bearing], "chunks"
    if deltas and not any(bearing):
        bearing[-1] = True  # all of it came at the end, and none of it is text
    shares = iter(_spread(total, sum(bearing)))
    return [next(shares) if bears else 0 for bears in bearing], "usage"


def _spread(total: int, places: int) -> list[int]:
    """Spreads `total` evenly in whole numbers; the first place gets at least one."""
    borders = [-(-place * total // max(1, places)) for place in range(places + 1)]
    return [later - earlier for earlier, later in itertools.pairwise(borders)]
