"""The queue's limits, checked at the door before any work is done for a request; how long a newcomer would wait.

The gate belongs to the client's side of the mailbox, so that a refusal does not wait for the end of a step. Plain
Python, no lock: the event loop's thread is its only caller. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lora_serve.core.errors import QueueFullError, TenantQueueFullError
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.engine import QueueLimits

_MEMORY = 5.0  # seconds of waiting after which an observation weighs 1/e
_UNKNOWN = 1.0  # seconds, while no request has left the queue yet
_WEIGHT = 0.15  # of the newest interval of a forecast: the last dozen count
OnStart = Callable[[str], None]  # gets the request's id


class WaitingLine:
    """Counts the waiting requests of one queue and their prompt tokens. Times are seconds of one monotonic clock.

    The drain rate is the number that left, divided by the seconds in which a request waited, both forgotten
    exponentially: an empty queue does not tell how fast it would drain.
    """

    def __init__(self, now: float) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._requests_left = 0.0
        self._tokens_left = 0.0
        self._seconds = 0.0
        self._seen_at = now

    def add(self, num_tokens: int, now: float) -> None:
        self._forget(now)
        self.num_requests += 1
        self.num_tokens += num_tokens

    def remove(self, num_tokens: int, now: float) -> None:
        self._forget(now)
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        self._requests_left += 1
        self._tokens_left += num_tokens

    def seconds_until_left(self, num_requests: int, num_tokens: int, now: float) -> float:
        """The seconds, at the present rates, until so many requests and so many tokens have left."""
        self._forget(now)
        if self._requests_left == 0.0:
            return _UNKNOWN
        requests = num_requests * self._seconds / self._requests_left
        return max(requests, num_tokens * self._seconds / max(self._tokens_left, 1e-9))

    def _forget(self, now: float) -> None:
        elapsed, self._seen_at = now - self._seen_at, now
        if self.num_requests == 0:
            return
        kept = math.exp(-elapsed / _MEMORY)
        self._requests_left *= kept
        self._tokens_left *= kept
        self._seconds = self._seconds * kept + _MEMORY * (1 - kept)


@dataclass(frozen=True, slots=True)
class WaitingLimit:
    """A caller's own line beside its account's: at most `max_requests` of `name` wait."""

    name: str
    max_requests: int


@dataclass(frozen=True, slots=True)
class _QueuedRequest:
    lines: tuple[str, ...]
    num_tokens: int  # of the prompt
    on_start: OnStart | None


class QueueGate:
    """A request waits from `enter` until `leave`: it has started, or ended before it could.

    A request that exceeds a limit by itself enters when no other waits, or it never could.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._waiting: dict[str, _QueuedRequest] = {}  # by request id
        self._all = WaitingLine(clock())
        self.forecast = WaitForecast()
        self._lines: dict[str, WaitingLine] = {}  # by account and WaitingLimit, only those with waiting requests

    @property
    def num_requests(self) -> int:
        return self._all.num_requests

    @property
    def num_tokens(self) -> int:
        return self._all.num_tokens

    def num_waiting(self, name: str) -> int:
        """The number of an account's requests that wait, or of a WaitingLimit's."""
        return line.num_requests if (line := self._lines.get(name)) is not None else 0

    def limit(self, limits: QueueLimits) -> None:
        """Other limits from now on; requests that wait already go on waiting."""
        self.limits = limits

    def check(self) -> None:
        """Raises QueueFullError if not even the smallest request may enter: cheap, called before a body is read."""
        self._check_all(1, 1, self._clock())

    def predicted_wait(self, requests: Sequence[InferenceRequest]) -> float:
        """The seconds until these requests would start, if they came now; infinity if they would be refused."""
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        if any(_excess(self._all, len(requests), num_tokens, self.limits.max_queue, self.limits.max_queue_tokens)):
            return math.inf
        return self.forecast.seconds(self._all.num_requests, self._all.num_tokens, self._clock())

    def enter(
        self,
        requests: Sequence[InferenceRequest],
        *,
        limited: bool = True,
        lines: Sequence[WaitingLimit] = (),
        on_start: OnStart | None = None,
    ) -> None:
        """Lets all of one answer's requests wait, or none. Requests that wait already are not counted again.

        `limited` False: without a check. `lines`: the caller's own limits. `on_start`: called when one of them begins
        to be computed. Raises QueueFullError, TenantQueueFullError.
        """
        now = self._clock()
        fresh = [request for request in requests if request.request_id not in self._waiting]
        if limited and fresh:
            num_tokens = sum(len(request.prompt_token_ids) for request in fresh)
            self._check_all(len(fresh), num_tokens, now)
            limits = self.limits
            own = (_account(fresh[0]), limits.max_tenant_queue, limits.max_tenant_queue_tokens)
            for name, max_requests, max_tokens in (own, *((limit.name, limit.max_requests, None) for limit in lines)):
                if (line := self._lines.get(name)) is not None:
                    excess = _excess(line, len(fresh), num_tokens, max_requests, max_tokens)
                    self._check_line(line, max_requests, max_tokens, excess, now)
        for request in fresh:
            names, num_tokens = (_account(request), *(limit.name for limit in lines)), len(request.prompt_token_ids)
            self._waiting[request.request_id] = _QueuedRequest(names, num_tokens, on_start)
            if self._all.num_requests == 0:
                self.forecast.begin(now)
            self._all.add(num_tokens, now)
            for name in names:
                self._lines.setdefault(name, WaitingLine(now)).add(num_tokens, now)

    def start(self, request_id: str) -> None:
        """Notes that a request's first tokens are in a step, so it waits no longer."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        self.leave(request_id)
        self.forecast.started(request_id, self._clock())
        if waiting.on_start is not None:
            waiting.on_start(request_id)

    def leave(self, request_id: str) -> None:
        """Ends the wait of a request; one that waits no longer has ended."""
        waiting = self._waiting.pop(request_id, None)
        now = self._clock()
        if waiting is None:
            self.forecast.ended(request_id, now)
            return
        self._all.remove(waiting.num_tokens, now)
        self.forecast.left(waiting.num_tokens, now, others_wait=self._all.num_requests > 0)
        for name in waiting.lines:
            line = self._lines[name]
            line.remove(waiting.num_tokens, now)
            if line.num_requests == 0:
                del self._lines[name]

    @contextmanager
    def entered(
        self, requests: Sequence[InferenceRequest], lines: Sequence[WaitingLimit] = (), on_start: OnStart | None = None
    ) -> Iterator[None]:
        """Calls `enter` now, and `leave` at the end of the block for the requests that still wait then."""
        self.enter(requests, lines=lines, on_start=on_start)
        try:
            yield
        finally:
            for request in requests:
                self.leave(request.request_id)

    def _check_all(self, num_requests: int, num_tokens: int, now: float) -> None:
        limits, line = self.limits, self._all
        excess = _excess(line, num_requests, num_tokens, limits.max_queue, limits.max_queue_tokens)
        if any(excess):
            raise QueueFullError(
                f"The queue is full ({line.num_requests} requests with {line.num_tokens} prompt tokens wait); try "
                "again after the seconds in Retry-After.",
                line.seconds_until_left(*excess, now),
                "queue_requests" if excess[0] else "queue_tokens",
            )

    def _check_line(
        self, line: WaitingLine, max_requests: int | None, max_tokens: int | None, excess: tuple[int, int], now: float
    ) -> None:
        if any(excess):
            raise TenantQueueFullError(
                f"{line.num_requests} of your requests with {line.num_tokens} prompt tokens wait already; try again "
                "after the seconds in Retry-After.",
                line.seconds_until_left(*excess, now),
                "tenant_requests" if excess[0] else "tenant_tokens",
                requests=None if max_requests is None else (max_requests, max(0, max_requests - line.num_requests)),
                tokens=None if max_tokens is None else (max_tokens, max(0, max_tokens - line.num_tokens)),
            )


def _account(request: InferenceRequest) -> str:
    return request.account or request.tenant


def _excess(
    line: WaitingLine, num_requests: int, num_tokens: int, max_requests: int | None, max_tokens: int | None
) -> tuple[int, int]:
    """The numbers of requests and tokens that must leave the line first."""
    requests = 0 if max_requests is None else line.num_requests + num_requests - max_requests
    tokens = 0 if max_tokens is None else line.num_tokens + num_tokens - max_tokens
    return min(max(0, requests), line.num_requests), min(max(0, tokens), line.num_tokens)


class _MeanInterval:
    """A running mean of the time between two events. An interval under way counts for as long as it is already, so that
    a queue which has come to a stop is noticed before its next event.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0
        self._since = 0.0  # when the interval under way began

    def begin(self, now: float) -> None:
        self._since = now

    def note(self, now: float) -> None:
        self._count += 1
        self._mean += max(_WEIGHT, 1 / self._count) * (now - self._since - self._mean)
        self._since = now

    def seconds(self, now: float) -> float:
        under_way = now - self._since
        return self._mean + max(0.0, (_WEIGHT if self._count else 1.0) * (under_way - self._mean))


class WaitForecast:
    """Two paces: at which requests leave the queue while others wait, and at which rows end while none is free."""

    def __init__(self) -> None:
        self.places: int | None = None  # rows that run at once, as the engine last said; None: not known
        self._running: set[str] = set()  # request ids
        self._line, self._rows = _MeanInterval(), _MeanInterval()
        self._num_tokens = 0.0  # of the prompts that left, a running mean

    @property
    def is_full(self) -> bool:
        """True if a newcomer has to wait for the end of a row."""
        return self.places is not None and len(self._running) >= self.places

    def begin(self, now: float) -> None:
        """The first request entered an empty queue."""
        self._line.begin(now)

    def left(self, num_tokens: int, now: float, *, others_wait: bool) -> None:
        """A request with so many prompt tokens left the queue. If none waits behind it and rows were free, it has not
        waited: it only came to its step.
        """
        if others_wait or self.is_full:
            self._line.note(now)
            self._num_tokens += (_WEIGHT if self._num_tokens else 1.0) * (num_tokens - self._num_tokens)

    def started(self, request_id: str, now: float) -> None:
        """A request has a row."""
        was_full = self.is_full
        self._running.add(request_id)
        if self.is_full and not was_full:
            self._rows.begin(now)

    def ended(self, request_id: str, now: float) -> None:
        """A request has no row any more, or never had one."""
        if request_id not in self._running:
            return
        if self.is_full:
            self._rows.note(now)
        self._running.discard(request_id)

    def seconds(self, num_waiting: int, num_tokens: int, now: float) -> float:
        """The seconds that a newcomer waits behind so many requests with so many prompt tokens."""
        of_rows = self._rows.seconds(now) if self.is_full else 0.0
        if num_waiting == 0:
            return of_rows
        places = max(num_waiting + 1, num_tokens / self._num_tokens if self._num_tokens else 0.0)
        return max(self._line.seconds(now), of_rows) * places
