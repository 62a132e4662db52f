"""One neighbour: its connections, its breaker, and what is known of it."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import msgspec

from lora_serve.server.overflow.reading import NOT_JSON, NeighbourError, NeighbourOutcome

_FAILURES = 3  # in a row
_FIRST_REST = 1.0
_LONGEST_REST = 60.0
HEADER = "X-Lora-Serve-Overflow"  # of a request that comes from another server: it is computed where it arrives
CONNECT = 1.0  # seconds
PROBE = 5.0  # seconds
KEEP_ALIVE = 3.0  # seconds; vLLM's web server closes idle connections after 5
MAX_ROWS = 256  # under way at once
FORGET_MODEL = 60.0  # seconds after which an unknown model is asked for again
FORGET_PACE = 10.0  # seconds in which the last times to a first token lose their weight
MAX_UNKNOWN = 10_000
_MAX_PROBE_BYTES = 2**25
_CERTAIN = (NeighbourOutcome.UNREACHABLE, NeighbourOutcome.BUSY, NeighbourOutcome.FORBIDDEN)
_BY_STATUS = {
    401: NeighbourOutcome.FORBIDDEN,
    403: NeighbourOutcome.FORBIDDEN,
    404: NeighbourOutcome.UNKNOWN_MODEL,
    429: NeighbourOutcome.BUSY,
    503: NeighbourOutcome.BUSY,
}
_log = logging.getLogger(__name__)


class BreakerState(enum.StrEnum):
    CLOSED = "closed"  # requests pass
    OPEN = "open"  # none does
    HALF_OPEN = "half-open"  # the probe was answered: one request at a time


class Breaker:
    """Open after failures in a row, or after one that leaves no doubt; each time twice as long as before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = BreakerState.CLOSED
        self._clock = clock
        self._num_failures = 0
        self._rest = _FIRST_REST
        self._until = 0.0
        self._has_trial = False

    @property
    def lets_pass(self) -> bool:
        """True if a request may be sent now."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and not self._has_trial)

    @property
    def wants_probe(self) -> bool:
        """True once an open breaker has rested long enough."""
        return self.state is BreakerState.OPEN and self._clock() >= self._until

    def begin(self) -> None:
        """A request is sent."""
        self._has_trial = self._has_trial or self.state is BreakerState.HALF_OPEN

    def probed(self, *, is_well: bool) -> None:
        """The probe has ended."""
        if is_well:
            self.state, self._has_trial = BreakerState.HALF_OPEN, False
        else:
            self._open(0.0)

    def began(self) -> None:
        """An answer has begun. If it breaks off, its failure counts with those before."""
        if self.state is BreakerState.HALF_OPEN:
            self.state, self._has_trial = BreakerState.CLOSED, False

    def succeeded(self) -> None:
        """A request was answered to its end."""
        if self.state is not BreakerState.OPEN:
            self._num_failures, self._rest = 0, _FIRST_REST

    def abandoned(self) -> None:
        """A request ended without saying anything of the neighbour."""
        self._has_trial = False

    def failed(self, *, is_certain: bool = False, rest: float = 0.0) -> None:
        """A request failed. `is_certain`: the next one would too. `rest`: the least time to leave it alone."""
        self._num_failures += 1
        if self.state is BreakerState.OPEN:
            return  # it was under way when it was opened
        if is_certain or self.state is BreakerState.HALF_OPEN or self._num_failures >= _FAILURES:
            self._open(rest)

    def _open(self, rest: float) -> None:
        self.state, self._has_trial = BreakerState.OPEN, False
        self._until = self._clock() + min(_LONGEST_REST, max(self._rest, rest))
        self._rest = min(_LONGEST_REST, 2 * self._rest)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Neighbour:
    """Made by the wiring; `running` opens its connections on the event loop."""

    def __init__(
        self, name: str, url: str, api_key: str | None, sender: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sender`: says in HEADER from whom a request comes."""
        self.name = name
        self.url = url
        self.sender = sender
        self.breaker = Breaker(clock)
        self.is_self = False  # it was found to be this very server
        self._key = api_key
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._num_rows = 0
        self._unknown: dict[tuple[str, str], float] = {}  # (model, digests) -> until when it is not asked for
        self._first_token = 0.0  # seconds, a running mean
        self._seen_at = -math.inf

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold connections for as long as the block lasts."""
        headers = {HEADER: self.sender, "Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT, sock_connect=CONNECT),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            auto_decompress=False,
        )
        async with self._session:
            yield

    def may_be_asked(self, num_rows: int, model: str, digests: str) -> bool:
        """True if the neighbour has not failed lately, may take more rows, and may know the model."""
        if self.is_self or self._num_rows + num_rows > MAX_ROWS or not self.breaker.lets_pass:
            return False
        until = self._unknown.get((model, digests))
        return until is None or until < self._clock()

    @property
    def expected(self) -> float:
        """Seconds that a first token took there lately; the longer ago, the less it says."""
        return self._first_token * math.exp((self._seen_at - self._clock()) / FORGET_PACE)

    @contextmanager
    def row(self) -> Iterator[None]:
        """Count a row that is sent there, for as long as the block lasts."""
        self.breaker.begin()
        self._num_rows += 1
        try:
            yield
        finally:
            self._num_rows -= 1

    @asynccontextmanager
    async def answer(
        self, path: str, body: dict[str, Any], request_id: str, digests: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask, and give the answer once its head is there. Raises NeighbourError, also while the block reads it."""
        assert self._session is not None, "it is not running"
        data = json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        try:
            async with self._session.post(
                self.url + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                _check_status(response)
                _check_version(response, digests)
                yield response
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
            raise NeighbourError(NeighbourOutcome.UNREACHABLE, f"no connection ({type(error).__name__})") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NeighbourError(NeighbourOutcome.BROKEN, f"the connection broke ({type(error).__name__})") from None

    def began(self, first_token: float) -> None:
        """A first token came after so many seconds."""
        weight = max(0.2, 1 - math.exp((self._seen_at - self._clock()) / FORGET_PACE))
        self._first_token += weight * (first_token - self._first_token)
        self._seen_at = self._clock()
        if self.breaker.state is not BreakerState.CLOSED:
            _log.info("overflow: the neighbour %s answers again", self.name)
        self.breaker.began()

    def answered(self) -> None:
        """An answer came to its end."""
        self.breaker.succeeded()

    def failed(self, error: NeighbourError, model: str, digests: str) -> None:
        """A request was not answered."""
        if error.outcome is NeighbourOutcome.REFUSED:
            self.breaker.abandoned()  # it says something of this request alone
            return
        if error.outcome is NeighbourOutcome.UNKNOWN_MODEL:
            self.breaker.abandoned()
            if len(self._unknown) >= MAX_UNKNOWN:
                self._unknown.clear()
            self._unknown[model, digests] = self._clock() + FORGET_MODEL
            _log.warning("overflow: the neighbour %s is not asked for the model %r: %s", self.name, model, error)
            return
        was_open = self.breaker.state is BreakerState.OPEN
        self.breaker.failed(is_certain=error.outcome in _CERTAIN, rest=error.retry_after)
        if self.breaker.state is BreakerState.OPEN and not was_open:
            _log.warning("overflow: the neighbour %s is left alone for a while: %s", self.name, error)

    async def probe(self) -> frozenset[str] | None:
        """The models that it serves; None, and a line in the log, if it does not answer."""
        assert self._session is not None, "it is not running"
        try:
            async with (
                asyncio.timeout(PROBE),
                self._session.get(f"{self.url}/v1/models", allow_redirects=False) as response,
            ):
                _check_status(response)
                text = await response.content.read(_MAX_PROBE_BYTES)
                while part := await response.content.read(_MAX_PROBE_BYTES - len(text)):
                    text += part
            return frozenset(model.id for model in msgspec.json.decode(text, type=_Models).data)
        except (NeighbourError, aiohttp.ClientError, OSError, *NOT_JSON) as error:
            reason = str(error) if isinstance(error, NeighbourError) else type(error).__name__
            _log.warning("overflow: the neighbour %s does not answer GET /v1/models: %s", self.name, reason)
            return None


def _check_status(response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status == 200:
        return
    others = NeighbourOutcome.FAILED if status >= 500 else NeighbourOutcome.REFUSED
    outcome = _BY_STATUS.get(status, others)
    after = response.headers.get("Retry-After", "")
    raise NeighbourError(outcome, f"status {status}", float(after) if after.isdecimal() and len(after) < 6 else 0.0)


def _check_version(response: aiohttp.ClientResponse, digests: str) -> None:
    """Another lora-serve says which version answers: it must be the one that would have answered here."""
    found = response.headers.get("X-Adapter-Digest")
    if found is not None and found != digests:
        raise NeighbourError(NeighbourOutcome.UNKNOWN_MODEL, "it serves another version of the adapter under this name")
