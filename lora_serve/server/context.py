"""The facts of one request while it is inside the server, its adapters among them, and every answer's headers."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from urllib.parse import quote

from aiohttp import web

from lora_serve.adapters.catalog.catalog import Resolution
from lora_serve.adapters.catalog.entry import CatalogEntry, Route
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import Standings
from lora_serve.core.messages import Timings
from lora_serve.core.request import OnCold
from lora_serve.core.tenant import Caller

BASE_VERSION = "0"  # X-Adapter-Version of the base model
SERVER_NAME = "lora-serve"  # not which Python and aiohttp, as by default
# They keep browsers and caches from doing more with an answer than show it to its caller. A handler may set others: a
# page brings a policy of its own.
_SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


BASE_DIGEST = "base"  # X-Adapter-Digest of the base model


@dataclass(frozen=True, slots=True)
class AdapterMember:
    """One adapter whose deltas count `scale` times."""

    ref: AdapterRef
    scale: float = 1.0
    resolution: Resolution | None = field(default=None, compare=False)  # of the caller's name; None: nobody named it

    def canary_route(self, entries: Mapping[str, CatalogEntry]) -> Route | None:
        """The route that chose the version, if it has a canary and is the same in these entries, which are of now."""
        named = self.resolution
        if named is None or named.names_version or named.entry.route.canary is None:
            return None
        entry = entries.get(named.entry.name)
        return None if entry is None or entry.route != named.entry.route else entry.route


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of one answer: y = W x + sum over members of scale * B A x. Without members the base model answers.

    Names, versions and digests have one element per adapter, in the caller's order.
    """

    members: tuple[AdapterMember, ...]
    base_name: str

    @property
    def is_composed(self) -> bool:
        """True unless this is the base model, or one adapter just as it was trained."""
        return len(self.members) > 1 or any(member.scale != 1.0 for member in self.members)

    @property
    def single(self) -> AdapterRef | None:
        """The only adapter, whose added tokens count. Adapters that add tokens are never composed."""
        return self.members[0].ref if len(self.members) == 1 else None

    @property
    def named(self) -> Resolution | None:
        """The meaning of the caller's name, if it named one adapter: with it come defaults and a chat template."""
        return self.members[0].resolution if len(self.members) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.ref.name for member in self.members) or (self.base_name,)

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(str(member.ref.version) for member in self.members) or (BASE_VERSION,)

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(member.ref.digest for member in self.members) or (BASE_DIGEST,)

    @property
    def model(self) -> str:
        """`model` of the answer: the names joined by "+"."""
        return "+".join(self.names)

    @property
    def label(self) -> str:
        """`a@1+b@2`, for the log."""
        return "+".join(f"{name}@{version}" for name, version in zip(self.names, self.versions, strict=True))


@dataclass(slots=True)
class AuditNote:
    """The subject of an admin act, where the URL does not say it: filled in by the act's handler."""

    subject: str = ""
    owner: str = ""  # the tenant to whom the subject belongs
    digest: str = ""


@dataclass(slots=True)
class RequestContext:
    """One request; its fields are filled in on the way. Times are seconds of `time.monotonic()`."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    client_request_id: str = ""  # its own name of the request: for the answer's header and the log, never a key
    started: float = field(default_factory=time.monotonic)
    caller: Caller | None = None
    authenticate: Callable[[], Caller] | None = None  # says who calls, as it is now
    adapters: AdapterSet | None = None  # that answer
    active: tuple[str, ...] = ()  # `1` or `0` for each adapter, see X-Adapter-Active
    fell_back: OnCold | None = None  # `base` or `previous`: `adapters` answer for others that were cold
    served_by: str = ""  # the neighbour that computed the answer, or some of its rows; empty: this server
    replicas: dict[int, str] = field(default_factory=dict)  # by row: the engine of a fleet that computed it, or none
    timings: Timings | None = None  # the slowest of the request's rows, part by part
    decode: float | None = None  # seconds after the first token
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    rate_limits: Standings = field(default_factory=dict)  # of a limited caller, once they are known
    audit: AuditNote = field(default_factory=AuditNote)
    is_noise: bool = False  # one of very many refusals; in the log only where everything is

    def enter(self, authenticate: Callable[[], Caller]) -> Caller:
        """Note the caller. Raises what `authenticate` raises."""
        self.authenticate = authenticate
        self.caller = authenticate()
        return self.caller

    def enter_again(self) -> None:
        """Authenticate again after a body that may have come slowly, so that nobody keeps a request half sent for the
        time after the key's revocation. Raises AuthenticationError, ForbiddenError.
        """
        if self.authenticate is not None:
            self.enter(self.authenticate)

    @property
    def known_caller(self) -> Caller:
        """The caller of a request whose route stands behind a guard of middleware.py."""
        assert self.caller is not None, "the route has no guard"
        return self.caller

    @property
    def replica_names(self) -> list[str]:
        """The engines that computed the answer: one, unless it was lost, or rows ran one after another."""
        return [name for name in dict.fromkeys(self.replicas.values()) if name]

    def log_fields(self) -> dict[str, object]:
        """The fields of every line of log written for the request, as far as they are known by now.

        `-` and None: nobody, nothing, or not yet. Never a prompt, never a key.
        """
        places = {"served_by": self.served_by, "replica": ",".join(self.replica_names)}
        elsewhere = {name: place for name, place in places.items() if place}
        return {
            "request_id": self.request_id,
            **({"client_request_id": self.client_request_id} if self.client_request_id else {}),
            "tenant": self.caller.tenant if self.caller else "-",
            "adapter": self.adapters.label if self.adapters else "-",
            "digest": "+".join(self.adapters.digests) if self.adapters else None,
            **elsewhere,
        }


CONTEXT = web.RequestKey("context", RequestContext)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Called by aiohttp just before an answer's headers are sent, whatever made the answer."""
    if (context := request.get(CONTEXT)) is not None:
        response.headers.update(_own_headers(context))
    secure(response.headers)


def secure(headers: MutableMapping[str, str]) -> None:
    """Add the security headers. Those that let a page of another site read an answer are browser_guard.py's."""
    for name, value in _SECURITY_HEADERS.items():
        headers.setdefault(name, value)
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Server"] = SERVER_NAME


def _own_headers(context: RequestContext) -> dict[str, str]:
    headers = {"X-Request-Id": context.client_request_id or context.request_id}
    if context.adapters is not None:
        headers |= _adapter_headers(context.adapters, context)
    if context.served_by:
        headers["X-Served-By"] = context.served_by
    if names := context.replica_names:
        headers["X-Replica-Id"] = ",".join(names)
    for unit, state in context.rate_limits.items():
        # https://platform.openai.com/docs/guides/rate-limits
        headers[f"x-ratelimit-limit-{unit}"] = str(state.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(state.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = duration(state.reset)
    if context.timings is not None:
        headers["Server-Timing"] = _server_timing(context.timings, context.decode)
    return headers


def _adapter_headers(adapters: AdapterSet, context: RequestContext) -> dict[str, str]:
    """The values of the adapters, comma-separated; no header without values."""
    values = {
        "X-Adapter-Id": [quote(name, safe="/@:+ ") for name in adapters.names],
        "X-Adapter-Version": adapters.versions,
        "X-Adapter-Digest": adapters.digests,
        "X-Adapter-Scale": [str(member.scale) for member in adapters.members] if adapters.is_composed else [],
        "X-Adapter-Active": context.active,
        "X-Adapter-Fallback": [context.fell_back.value] if context.fell_back else [],
    }
    return {name: ",".join(parts) for name, parts in values.items() if parts}


def duration(seconds: float) -> str:
    """`1m30s`, `6.5s`, `12ms`, `0s`: rounded up, so that waiting that long is enough."""
    milliseconds = math.ceil(1000 * seconds)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


def _server_timing(timings: Timings, decode: float | None) -> str:
    """W3C Server-Timing; durations in milliseconds."""
    parts = {"queue": timings.queue, "load": timings.load, "prefill": timings.prefill}
    if decode is not None:
        parts["decode"] = decode
    return ", ".join(f"{name};dur={seconds * 1000:.2f}" for name, seconds in parts.items())
