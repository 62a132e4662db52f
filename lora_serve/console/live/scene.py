"""The engine as one scope may see it: everything, or what belongs to one tenant."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_serve.core.live import EngineView, LiveCount, LiveMove, LiveRequest, LiveSlot, LiveStep

_PER_E = 20  # buckets for each factor of e: a quantile is right to 2.5 percent
_SMALLEST = 0.01  # ms, and less
_NUM_BUCKETS = 400  # up to about 80 minutes
_FORGOTTEN = 0.3  # a count that has faded to this is none
_LONG_PAUSE = 60  # seconds
_MAX_KNOWN = 4096  # requests
Owns = Callable[[str, float, str, str], bool]  # whether a tenant, made then, has an adapter of this name and digest
_Uses = Mapping[tuple[str, str], tuple[int, int]]  # by digest and name: the version, and how many rows use it


class TokenRate(Struct, frozen=True):
    """Tokens of the last second."""

    prompt: int
    output: int


class Percentiles(Struct, frozen=True):
    """Milliseconds; None: nothing was measured lately."""

    p50: float | None
    p95: float | None


class Latency(Struct, frozen=True):
    """Times as callers saw them, of lately."""

    first_token_ms: Percentiles
    inter_token_ms: Percentiles


class FadingTimes:
    """Times in milliseconds, of which older ones weigh less."""

    def __init__(self, kept: float) -> None:
        """`kept`: the part of a count that is left a second later."""
        self._counts = [0.0] * _NUM_BUCKETS
        self._kept = kept
        self._faded_at = math.inf

    def add(self, ms: float, count: int = 1) -> None:
        """Counts a time."""
        bucket = int(_PER_E * math.log(ms / _SMALLEST)) if ms > _SMALLEST else 0
        self._counts[min(bucket, _NUM_BUCKETS - 1)] += count

    def fade(self, now: float) -> None:
        """Lets what was counted weigh less, by whole seconds."""
        self._faded_at = min(self._faded_at, now)
        seconds = int(now - self._faded_at)
        if seconds > 0:
            self._faded_at += seconds
            share = self._kept**seconds if seconds < _LONG_PAUSE else 0.0
            self._counts = [count * share if count * share > _FORGOTTEN else 0.0 for count in self._counts]

    def percentiles(self) -> Percentiles:
        """The median and the 95th percentile."""
        up_to = list(accumulate(self._counts))
        if not up_to[-1]:
            return Percentiles(None, None)
        return Percentiles(*(_middle(bisect_left(up_to, share * up_to[-1])) for share in (0.5, 0.95)))


class LastSecond:
    """Tokens of steps that ended within the last second."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int]] = deque()
        self._prompt = self._output = 0

    def add(self, time: float, prompt: int, output: int) -> None:
        """Counts the tokens of a step."""
        self._steps.append((time, prompt, output))
        self._prompt += prompt
        self._output += output

    def rate(self, now: float) -> TokenRate:
        """The tokens of the second before `now`. Steps of a second later are forgotten: the clock was set back."""
        while self._steps and abs(now - self._steps[0][0]) >= 1:
            _, prompt, output = self._steps.popleft()
            self._prompt -= prompt
            self._output -= output
        return TokenRate(self._prompt, self._output)


def _middle(bucket: int) -> float:
    return round(_SMALLEST * math.exp((bucket + 0.5) / _PER_E), 3)


class _OfAdapter(Protocol):
    @property
    def digest(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def tenant(self) -> str: ...


T = TypeVar("T", bound=_OfAdapter)


@dataclass(frozen=True, slots=True)
class Happened:
    """The events of some views."""

    steps: Sequence[LiveStep]
    ended: Sequence[LiveRequest]
    moves: Sequence[LiveMove]


def _rows_by_use(running: Iterable[LiveRequest]) -> _Uses:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for request in running:
        for (digest, name), version in {(one.digest, one.name): one.version for one in request.adapters}.items():
            found[digest, name] = version, found.get((digest, name), (0, 0))[1] + 1
    return found


def _shown_as(slot: LiveSlot, names: Mapping[str, int], scope: str | None, *, is_owner: bool) -> LiveSlot | None:
    """The slot under its own name, if the scope may know that, else under the first that its rows use."""
    if scope is None or is_owner:
        others = tuple(sorted(names.keys() - {slot.name}))
        return replace(slot, also=others) if others else slot
    if not names:
        return None
    first, *left = sorted(names)
    return replace(slot, name=first, version=names[first], tenant=scope, pinned=False, also=tuple(left))


def _rows_of(slot: LiveSlot, rows: _Uses, own: _Uses) -> int:
    """Rows under the slot's name, as `rows` counts them, and the scope's under other names."""
    return rows.get((slot.digest, slot.name), (0, 0))[1] + sum(own[slot.digest, name][1] for name in slot.also)


class Scene:
    """The part of the engine that one scope sees, and figures that are kept from look to look.

    `since`: when the scope's tenant was made, in Unix seconds. A tenant of the same name before it is another one.
    """

    def __init__(self, scope: str | None, since: float, owns: Owns) -> None:
        self.scope = scope
        self._since = since
        self._owns = owns
        self.requests: Sequence[LiveRequest] = ()
        self.queue: Mapping[str, LiveCount] = {}
        self.slots: Sequence[LiveSlot] = ()
        self.loading: Sequence[str] = ()
        self._tokens = LastSecond()
        self._first_tokens, self._gaps = FadingTimes(kept=0.97), FadingTimes(kept=0.9)  # many gaps to a first token
        self._last_tokens: dict[str, float] = {}  # when each request got its last token
        self._begun: set[str] = set()  # requests whose first token was counted

    def take(self, views: Iterable[EngineView], present: Sequence[EngineView]) -> Happened:
        """Takes in new looks; `present`: the last one at each engine. Returns what this scope may see of the events."""
        steps: list[LiveStep] = []
        ended: list[LiveRequest] = []
        moves: list[LiveMove] = []
        for view in views:
            steps += self._steps_of(view)
            ended += self._own_requests(view.ended)
            moves += self._own_adapters(view.moves)
        self._show(present)
        self._count_first_tokens((*self.requests, *ended))
        for step in steps:
            self._count(step)
        self._forget(ended)
        return Happened(steps, ended, moves)

    def tokens(self, now: float) -> TokenRate:
        """The tokens of the last second; `now`: Unix seconds."""
        return self._tokens.rate(now)

    def latency(self, now: float) -> Latency:
        """The times of lately; `now`: Unix seconds."""
        for times in (self._first_tokens, self._gaps):
            times.fade(now)
        return Latency(self._first_tokens.percentiles(), self._gaps.percentiles())

    def _own_requests(self, requests: Sequence[LiveRequest]) -> Sequence[LiveRequest]:
        if self.scope is None:
            return requests
        return [one for one in requests if one.tenant == self.scope and one.arrived >= self._since]

    def _own_adapters(self, items: Sequence[T]) -> Sequence[T]:
        return items if self.scope is None else [item for item in items if self._is_owner(item)]

    def _is_owner(self, item: _OfAdapter) -> bool:
        scope = self.scope
        return scope is not None and item.tenant == scope and self._owns(scope, self._since, item.name, item.digest)

    def _steps_of(self, view: EngineView) -> Iterable[LiveStep]:
        """The steps with the scope's own rows alone."""
        if self.scope is None:
            return view.steps
        own = {request.id for request in self._own_requests((*view.requests, *view.ended))}
        rows = [(step, tuple(row for row in step.rows if row[0] in own)) for step in view.steps]
        return [replace(step, rows=kept) for step, kept in rows if kept]

    def _slots_of(self, view: EngineView) -> Iterable[LiveSlot]:
        """The slots that the scope owns or uses, under names that it knows: adapters of the same bytes share one."""
        running = [request for request in view.requests if request.state == "running"]
        mine = self._own_requests(running)
        own = _rows_by_use(mine)
        rows = _rows_by_use([*mine, *(request for request in running if request.tenant != self.scope)])
        names: dict[str, dict[str, int]] = {}  # by digest: names and versions that the scope's rows use
        for (digest, name), (version, _) in own.items():
            names.setdefault(digest, {})[name] = version
        shown = list[LiveSlot]()
        for slot in view.slots:
            is_owner = self._is_owner(slot)
            shown_as = _shown_as(slot, names.get(slot.digest, {}), self.scope, is_owner=is_owner)
            if shown_as is not None and self.scope is not None:  # of an adapter that others own, it knows its own rows
                shown_as = replace(shown_as, num_rows=_rows_of(shown_as, rows if is_owner else own, own))
            if shown_as is not None:
                shown.append(shown_as)
        return shown

    def _show(self, present: Sequence[EngineView]) -> None:
        self.requests = [request for view in present for request in self._own_requests(view.requests)]
        self.slots = [slot for view in present for slot in self._slots_of(view)]
        self.loading = list(dict.fromkeys(load.digest for view in present for load in self._own_adapters(view.loads)))
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for view in present:
            for tenant, count in self._queue_of(view).items():
                waiting[tenant] += count.waiting
                running[tenant] += count.running
        self.queue = {tenant: LiveCount(waiting[tenant], running[tenant]) for tenant in waiting}

    def _queue_of(self, view: EngineView) -> Mapping[str, LiveCount]:
        scope = self.scope
        if scope is None:
            return view.queue
        own = self._own_requests(view.requests)
        if len(own) == sum(request.tenant == scope for request in view.requests):
            return {scope: view.queue[scope]} if scope in view.queue else {}
        num_running = sum(request.state == "running" for request in own)  # the former tenant's are in look.queue
        return {scope: LiveCount(len(own) - num_running, num_running)} if own else {}

    def _count_first_tokens(self, requests: Iterable[LiveRequest]) -> None:
        for request in requests:
            if request.first_token_ms is not None and request.id not in self._begun:
                self._begun.add(request.id)
                self._first_tokens.add(request.first_token_ms)

    def _count(self, step: LiveStep) -> None:
        prompt = output = 0
        last, time = self._last_tokens, step.time
        counts: dict[float, int] = {}  # by the last token's time: most rows got theirs in one and the same step
        for request_id, kind, num_tokens, num_new in step.rows:
            if kind != "decode" and kind != "draft":  # noqa: PLR1714  # this is the loop that costs
                prompt += num_tokens
            if num_new:
                output += num_new
                before = last.get(request_id)
                if before is not None:
                    counts[before] = counts.get(before, 0) + num_new
                last[request_id] = time
        self._tokens.add(time, prompt, output)
        for before, count in counts.items():
            self._gaps.add(1000 * (time - before), count)

    def _forget(self, ended: Iterable[LiveRequest]) -> None:
        for request in ended:
            self._last_tokens.pop(request.id, None)
            self._begun.discard(request.id)
        if len(self._last_tokens) > _MAX_KNOWN or len(self._begun) > _MAX_KNOWN:  # their ends were missed
            self._last_tokens.clear()
            self._begun = {request.id for request in self.requests}
