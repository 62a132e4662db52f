"""Sends one request, times each arrival, names what went wrong."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lora_serve.commands.bench.answer import Answer, EventStream, StreamError
from lora_serve.commands.bench.plan import PlannedRequest, Target
from lora_serve.commands.bench.result import RequestRecord

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
    answer, events, error, detail = Answer(), list[tuple[float, bytes]](), None, ""
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
