"""Waiting requests and their adapters: loads before their turn, turns for slots, and who answers if a load is late.

A request waits for its own adapters until its cold timeout. Then, as `on_cold` says, it ends with an error, or its
fallback answers: `base` at once; `previous` if it is resident, else whichever of both adapters arrives first. The
loads go on in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, LoraServeError
from lora_serve.core.request import AdapterUse, OnCold
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.scheduling.step_rows import StepRows
from lora_serve.engine.sequence import Sequence

PREFETCH_WINDOW = 64  # waiting sequences whose adapters are loaded before their turn
_MAX_PLACED = 2  # adapters put into free slots before their turn, in one step


@dataclass(slots=True)
class _SharedAnswer:
    """The requests that are choices of one answer: all of them get the adapters that the first of them got."""

    num_sequences: int = 0
    fell_back: bool | None = None  # None: open


class ColdStart:
    """Decides for requests that have not run yet, and keeps the residency informed of the adapters that they want."""

    def __init__(self, residency: AdapterResidency[Any]) -> None:
        self._residency = residency
        self._answers: dict[str, _SharedAnswer] = {}

    def join(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """Takes in a new request; returns its error if it may not even wait."""
        self._answers.setdefault(_answer_id(sequence), _SharedAnswer()).num_sequences += 1
        self._want(sequence, sequence.refs)
        self.note_cold(sequence, now)
        self.fall_back_if_due(sequence, now)
        ends_at = self.ends_at(sequence)
        return self.end(sequence, now) if ends_at is not None and now >= ends_at else None

    def start(self, sequence: Sequence) -> None:
        """Notes that the request runs with the adapters that it has now."""
        answer = self._answers[_answer_id(sequence)]
        if sequence.adapters or sequence.fell_back:
            answer.fell_back = sequence.fell_back

    def leave(self, sequence: Sequence) -> None:
        self._want(sequence, ())
        answer = self._answers[_answer_id(sequence)]
        answer.num_sequences -= 1
        if answer.num_sequences == 0:
            del self._answers[_answer_id(sequence)]

    def ends_at(self, sequence: Sequence) -> float | None:
        """The end of the request's cold timeout, in seconds of time.monotonic(); None if nothing has to happen then."""
        timeout = sequence.request.cold_timeout
        if timeout is None or sequence.cold_wait_is_over or _is_fixed(sequence) or not self.cold(sequence.adapters):
            return None
        return sequence.request.arrival_time + timeout

    def end(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """Ends the wait: the fallback answers, or whichever adapter arrives first will, or the request's error is
        returned.
        """
        sequence.cold_wait_is_over = True
        if sequence.request.on_cold in (OnCold.WAIT, OnCold.FAIL):
            self.ask(sequence)
            return self.cold_error(sequence)
        if sequence.fallback is not None and self._answer(sequence).fell_back is None:
            self._want(sequence, (*sequence.refs, *(use.ref for use in sequence.fallback)))
        self.ask(sequence)
        self.fall_back_if_due(sequence, now)
        return None

    def fall_back_if_due(self, sequence: Sequence, now: float) -> None:
        """Lets the fallback answer if its turn has come."""
        if sequence.fallback is None or _is_fixed(sequence):
            return
        fell_back = self._answer(sequence).fell_back
        is_its_turn = sequence.cold_wait_is_over and self.cold(sequence.adapters) and not self.cold(sequence.fallback)
        if fell_back or (fell_back is None and is_its_turn):
            self._fall_back(sequence, now)

    def ask(self, sequence: Sequence) -> bool:
        """Asks for the loads of all adapters that the request wants; False: host memory cannot take all."""
        asked = [self._residency.request(ref) for ref in sequence.wanted]
        return all(asked)

    def note_cold(self, sequence: Sequence, now: float) -> bool:
        """Notes, for the `load` time, whether the request has to wait for its adapters; returns that."""
        if self.cold(sequence.adapters):
            sequence.was_cold, sequence.cold_until = True, None
            return True
        if sequence.was_cold and sequence.cold_until is None:
            sequence.cold_until = now
        return False

    def load_failed(self, sequence: Sequence, digest: str, error: LoraServeError, now: float) -> LoraServeError | None:
        """Handles a failed load: the request's error, or None if its fallback can still answer."""
        fallback = sequence.fallback
        in_own, in_fallback = _holds(sequence.adapters, digest), _holds(fallback or (), digest)
        can_fall_back = not (fallback is None or _is_fixed(sequence) or in_fallback)
        if not in_own:
            sequence.fallback = None
            self._want(sequence, sequence.refs)
            return None
        if fallback is None or not can_fall_back or self._answer(sequence).fell_back is False:
            return error
        self._fall_back(sequence, now)
        return None

    def cold(self, uses: tuple[AdapterUse, ...]) -> list[AdapterRef]:
        """The adapters that are neither on the device nor in host memory."""
        return [use.ref for use in uses if not self._residency.is_here(use.ref.digest)]

    def cold_error(self, sequence: Sequence) -> AdapterUnavailableError:
        """The error of a request that waits no longer."""
        cold = self.cold(sequence.adapters)
        names = ", ".join(f"`{ref.name}`" for ref in cold)
        what = "adapter" if len(cold) == 1 else "adapters"
        verb = "is" if len(cold) == 1 else "are"
        message = f"The {what} {names} {verb} still being loaded; try again."
        return AdapterUnavailableError(message, retry_after=self._residency.retry_after(cold))

    def _fall_back(self, sequence: Sequence, now: float) -> None:
        """Replaces the request's adapters by its fallback's; nothing computed so far belongs to these."""
        self._answer(sequence).fell_back = True
        sequence.request = sequence.request.by_fallback()
        sequence.adapters, sequence.fallback, sequence.fell_back = sequence.request.adapters, None, True
        sequence.block_keys.clear()
        self._want(sequence, sequence.refs)
        self.ask(sequence)
        self.note_cold(sequence, now)

    def _want(self, sequence: Sequence, refs: tuple[AdapterRef, ...]) -> None:
        before = {ref.digest: ref for ref in sequence.wanted}
        after = {ref.digest: ref for ref in refs}
        for digest, ref in after.items():
            if digest not in before:
                self._residency.want(ref)
        for digest in before:
            if digest not in after:
                self._residency.unwant(digest)
        sequence.wanted = tuple(after.values())

    def _answer(self, sequence: Sequence) -> _SharedAnswer:
        return self._answers[_answer_id(sequence)]


def _answer_id(sequence: Sequence) -> str:
    return sequence.request.answer_id or sequence.request.request_id


def _is_fixed(sequence: Sequence) -> bool:
    """True if the request can change its adapters no more."""
    return sequence.fell_back or sequence.first_scheduled is not None


def _holds(uses: tuple[AdapterUse, ...], digest: str) -> bool:
    return any(use.ref.digest == digest for use in uses)


@dataclass(slots=True)
class AdapterPrefetcher:
    """Prefetches once per change (`is_due`): a request came or went, an adapter or grammar came, a command was done."""

    _policy: Policy
    _cold_start: ColdStart
    _residency: AdapterResidency[Any]
    is_due: bool = False

    def prefetch(self, rows: StepRows, now: float) -> None:
        """Looks at the next requests in the queue. `rows`: the step's, which needs its memory for itself."""
        if not self.is_due:
            return
        num_placed, is_asking = 0, True
        for sequence in islice(self._policy.prefetch_order(now), PREFETCH_WINDOW):
            self._cold_start.fall_back_if_due(sequence, now)
            if is_asking:  # a later request must not take memory that an earlier one waits for
                is_asking = self._cold_start.ask(sequence)
            for ref in sequence.refs:
                can_place = num_placed < _MAX_PLACED and rows.can_load(ref)
                num_placed += can_place and self._residency.place_if_free(ref)
        self.is_due = num_placed > 0  # there may be more


@dataclass(slots=True)
class SlotTurns:
    """Requests whose adapters are resident overtake a request that waits for a slot, up to a bound.

    Such overtaking costs the waiting request nothing until a slot falls free. Once `max_passes` rows have overtaken a
    request, or it has waited since before `horizon`, slots are reserved for the first such request: no request behind
    it may load another adapter, nor start on the adapters whose rows finish first, until these have left the device.
    All other rows go on. The request therefore waits at most as many steps as those rows have left.
    """

    _residency: AdapterResidency[Any]
    _policy: Policy
    _running: list[Sequence]  # the scheduler's own list, as it changes
    _max_passes: int
    _horizon: float  # seconds of time.monotonic()
    _passed: list[Sequence] = field(default_factory=list)
    _leaving: frozenset[str] | None = None  # adapters that the reserved slots hold; None: none are reserved

    def allows(self, sequence: Sequence) -> bool:
        """True if the sequence may try to get its slots."""
        refs = sequence.refs
        if self._leaving is not None and not all(
            ref.digest in self._residency.slots and ref.digest not in self._leaving for ref in refs
        ):
            return False
        return not self._residency.must_evict(refs) or self._policy.may_take_slot(sequence, self._running)

    def acquire(self, sequence: Sequence, preempt: Callable[[Sequence], None]) -> bool:
        """Gets slots for all adapters of a sequence, preempting others if the policy says so; False: not now.

        Raises AdapterUnavailableError if waiting would not help.
        """
        sequence.slots = self._residency.acquire(sequence.refs)
        for _ in sequence.refs:
            if self._residency.slots.exceeds_tenant_maximum(sequence.refs):
                break
            if sequence.slots or (victim := self._victim(sequence)) is None:
                break
            preempt(victim)
            sequence.slots = self._residency.acquire(sequence.refs)
        return bool(sequence.slots)

    def passed_over(self, sequence: Sequence) -> None:
        """Notes a sequence whose adapters are in host memory and find no slot."""
        if self._residency.slots.exceeds_tenant_maximum(sequence.refs):
            return  # only its owner's adapters can make way: no slot is reserved
        self._passed.append(sequence)
        waited_long = sequence.num_passed_over >= self._max_passes or sequence.waiting_since <= self._horizon
        if waited_long and self._leaving is None:
            self._leaving = self._residency.slots.first_to_finish(sequence.refs, self._num_steps_left())

    def started(self, sequence: Sequence) -> None:
        """Counts a sequence that started ahead of those that were passed over."""
        if sequence.adapters:
            for older in self._passed:
                older.num_passed_over += 1

    def _victim(self, newcomer: Sequence) -> Sequence | None:
        """The sequence to preempt for a newcomer's slots, if the policy names one: one that alone keeps its adapters
        resident.
        """
        if self._policy.victim(self._running, newcomer) is None:
            return None
        alone = [sequence for sequence in self._running if sequence.slots and self._keeps_alone(sequence)]
        return self._policy.victim(alone, newcomer) if alone else None

    def _keeps_alone(self, sequence: Sequence) -> bool:
        digests = [slot.digest for slot in sequence.slots]
        return all(self._residency.slots.num_rows(d) == 1 and not self._residency.is_protected(d) for d in digests)

    def _num_steps_left(self) -> dict[str, int]:
        left: dict[str, int] = {}
        for sequence in self._running:
            for slot in sequence.slots:
                left[slot.digest] = max(left.get(slot.digest, 0), sequence.num_steps_left)
        return left
