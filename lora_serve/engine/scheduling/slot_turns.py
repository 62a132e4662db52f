"""The order in which waiting requests get device slots, within one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lora_serve.engine.adapters.residency import AdapterResidency
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.sequence import Sequence


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
            return  # only its owner's adapters can make room: no slot is reserved
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
