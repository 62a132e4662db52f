"""What the web knows of one request while it is inside, and the headers every answer carries."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from aiohttp import web

from lora_serve.core.errors import Standings
from lora_serve.core.messages import Timings
from lora_serve.core.request import InferenceRequest
from lora_serve.core.tenant import Caller
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.fallback import Fallback
from lora_serve.server.rate_limit_headers import rate_limit_headers

BASE_VERSION = "0"  # X-Adapter-Version of the base model
BASE_DIGEST = "base"  # X-Adapter-Digest of the base model


@dataclass(frozen=True, slots=True)
class Answerer:
    """Who answers: adapters, or the base model. Each field has one element per adapter, in the caller's order."""

    names: tuple[str, ...]
    versions: tuple[str, ...]
    digests: tuple[str, ...]
    scales: tuple[str, ...] = ()  # empty: one adapter as it was trained
    active: tuple[str, ...] = ()  # empty: no adapter has invocation tokens
    fallback: str = ""  # "base" or "previous": it answers for adapters that were cold

    @classmethod
    def of(cls, adapters: AdapterSet, base_name: str, requests: Sequence[InferenceRequest] = ()) -> Answerer:
        """`requests`: one for each prompt."""
        if not adapters.members:
            return cls((base_name,), (BASE_VERSION,), (BASE_DIGEST,))
        refs = [member.ref for member in adapters.members]
        return cls(
            names=tuple(ref.name for ref in refs),
            versions=tuple(str(ref.version) for ref in refs),
            digests=tuple(ref.digest for ref in refs),
            scales=tuple(str(member.scale) for member in adapters.members) if adapters.is_composed else (),
            active=_active(adapters, requests) if requests and adapters.has_activated else (),
        )

    def replaced_by(self, fallback: Fallback, base_name: str) -> Answerer:
        """Who answers in this one's place. Its invocation tokens are the same, so it acts in the same prompts."""
        other = Answerer.of(fallback.adapters, base_name)
        return replace(other, active=self.active, fallback=fallback.on_cold.value)

    @property
    def model(self) -> str:
        """`model` of the answer."""
        return "+".join(self.names)

    @property
    def label(self) -> str:
        """`a@1+b@2`, for the log."""
        return "+".join(f"{name}@{version}" for name, version in zip(self.names, self.versions, strict=True))

    def headers(self) -> dict[str, str]:
        """The values of the adapters, comma-separated; no header without values."""
        values = {
            "X-Adapter-Id": [quote(name, safe="/@:+ ") for name in self.names],
            "X-Adapter-Version": self.versions,
            "X-Adapter-Digest": self.digests,
            "X-Adapter-Scale": self.scales,
            "X-Adapter-Active": self.active,
            "X-Adapter-Fallback": [self.fallback] if self.fallback else [],
        }
        return {name: ",".join(parts) for name, parts in values.items() if parts}


def _active(adapters: AdapterSet, requests: Sequence[InferenceRequest]) -> tuple[str, ...]:
    """`1` or `0`, or for several prompts in how many of them an adapter acts: `1/2`."""
    total = "" if len(requests) == 1 else f"/{len(requests)}"
    return tuple(f"{count}{total}" for count in adapters.active_in(requests))


@dataclass(slots=True)
class AuditNote:
    """What an admin act was about, where its URL does not say it: filled in by its handler."""

    subject: str = ""
    owner: str = ""  # the tenant whose it is
    digest: str = ""


@dataclass(slots=True)
class RequestContext:
    """Filled in on the way through; times are seconds of `time.monotonic()`."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.monotonic)
    caller: Caller | None = None
    authenticate: Callable[[], Caller] | None = None  # says who calls, as it is now
    answerer: Answerer | None = None
    fallback_answerer: Answerer | None = None  # who is the answerer if the engine says so
    timings: Timings | None = None  # the slowest of the request's sequences, part by part
    decode: float | None = None  # seconds after the first token
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    rate_limits: Standings = field(default_factory=dict)  # of a limited caller, once they are known
    audit: AuditNote = field(default_factory=AuditNote)
    is_noise: bool = False  # one of very many refusals; in the log only where everything is

    def enter(self, authenticate: Callable[[], Caller]) -> Caller:
        """Note who calls. Raises what `authenticate` raises."""
        self.authenticate = authenticate
        self.caller = authenticate()
        return self.caller

    def enter_again(self) -> None:
        """After a body that may have come slowly: a key that was revoked meanwhile opens nothing any more, so that
        nobody keeps a request half sent for later. Raises AuthenticationError, ForbiddenError.
        """
        if self.authenticate is not None:
            self.enter(self.authenticate)

    def admitted(self, timings: Timings, fell_back: bool = False) -> None:
        """One of the sequences has its prompt computed, by the fallback if it `fell_back`."""
        if fell_back and self.fallback_answerer is not None:
            self.answerer = self.fallback_answerer
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
    if context.answerer is not None:
        response.headers.update(context.answerer.headers())
    response.headers.update(rate_limit_headers(context.rate_limits))
    if context.timings is not None:
        response.headers["Server-Timing"] = _server_timing(context.timings, context.decode)


def _server_timing(timings: Timings, decode: float | None) -> str:
    """W3C Server-Timing; durations in milliseconds."""
    parts = {"queue": timings.queue, "load": timings.load, "prefill": timings.prefill}
    if decode is not None:
        parts["decode"] = decode
    return ", ".join(f"{name};dur={seconds * 1000:.2f}" for name, seconds in parts.items())
