"""What the web knows of one request while it is inside, and the headers every answer carries."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

from aiohttp import web

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.events import Timings
from lora_serve.tenancy.tenant import Tenant

BASE_VERSION = "0"  # X-Adapter-Version of the base model
BASE_DIGEST = "base"  # X-Adapter-Digest of the base model


@dataclass(frozen=True, slots=True)
class Answerer:
    """Who answers: one version of an adapter, or the base model."""

    name: str
    version: str
    digest: str

    @classmethod
    def of(cls, adapter: AdapterRef | None, base_name: str) -> Answerer:
        if adapter is None:
            return cls(base_name, BASE_VERSION, BASE_DIGEST)
        return cls(adapter.name, str(adapter.version), adapter.digest)


@dataclass(slots=True)
class RequestContext:
    """Filled in on the way through; times are seconds of `time.monotonic()`."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.monotonic)
    tenant: Tenant | None = None
    answerer: Answerer | None = None
    timings: Timings | None = None  # the slowest of the request's sequences, part by part
    decode: float | None = None  # seconds after the first token
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def admitted(self, timings: Timings) -> None:
        """One of the sequences has its prompt computed."""
        known = self.timings or Timings(0.0, 0.0, 0.0)
        self.timings = Timings(
            max(known.queue, timings.queue), max(known.load, timings.load), max(known.prefill, timings.prefill)
        )


CONTEXT = web.RequestKey("context", RequestContext)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Called by aiohttp just before an answer's headers are sent, whoever made it."""
    context = request.get(CONTEXT)
    if context is None:
        return
    response.headers["X-Request-Id"] = context.request_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Server"] = "lora-serve"  # not which Python and aiohttp, as by default
    if context.answerer is not None:
        response.headers["X-Adapter-Id"] = quote(context.answerer.name, safe="/@:+ ")
        response.headers["X-Adapter-Version"] = context.answerer.version
        response.headers["X-Adapter-Digest"] = context.answerer.digest
    if context.timings is not None:
        response.headers["Server-Timing"] = _server_timing(context.timings, context.decode)


def _server_timing(timings: Timings, decode: float | None) -> str:
    """W3C Server-Timing; durations in milliseconds."""
    parts = {"queue": timings.queue, "load": timings.load, "prefill": timings.prefill}
    if decode is not None:
        parts["decode"] = decode
    return ", ".join(f"{name};dur={seconds * 1000:.2f}" for name, seconds in parts.items())
