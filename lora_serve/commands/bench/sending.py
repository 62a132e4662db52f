"""Sends one request, times each arrival, names what went wrong."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import aiohttp

from lora_serve.commands.bench.answer import Answer, EventStream, StreamError
from lora_serve.commands.bench.plan import PlannedRequest, Target
from lora_serve.commands.bench.request_body import request_body, request_headers, request_url
from lora_serve.commands.bench.result import RequestRecord


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
    answer, events, error, detail = Answer(), list[tuple[float, bytes]](), None, ""
    sent = clock.now()
    try:
        async with asyncio.timeout(target.timeout):
            await _receive(http, request_url(target), body, headers, clock, events)
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
    return _record(request, index, answer, (sent, ended), error, detail)


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


def _record(
    request: PlannedRequest,
    index: int,
    answer: Answer,
    times: tuple[float, float],
    error: str | None,
    detail: str,
) -> RequestRecord:
    chunks, counted_by = answer.chunks()
    if error is None and not chunks:
        error, detail = "empty", "the answer has no token"
    return RequestRecord(
        index=index,
        adapter=request.adapter,
        prompt_tokens=answer.prompt_tokens or request.prompt_tokens,
        asked_tokens=request.output_tokens,
        planned=times[0] if request.at is None else request.at,
        sent=times[0],
        ended=times[1],
        chunks=chunks,
        counted_by=counted_by,
        text=answer.text,
        finish_reason=answer.finish_reason,
        error=error,
        detail=detail,
    )
