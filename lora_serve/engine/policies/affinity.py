"""Requests whose adapters are on the device first, so that one load serves as many rows as it can.

With many more adapters than slots, rarely used adapters take a slot for one row each in order of arrival, and evict the
adapters that the next rows need.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from lora_serve.engine.policies import base
from lora_serve.engine.sequence import Sequence

_Names = tuple[str, ...]  # sorted digests


class Policy(base.Policy):
    """Adapters on the device first, then those in host memory, the adapters of the most rows first, then cold ones.

    Skipped sequences age, see `base.Policy`. Loads do not wait for that: they are asked for in the order in which the
    adapters were first wanted. Each step looks at each set of adapters once, not at each sequence.
    """

    def __init__(self, view: base.PolicyView) -> None:
        super().__init__(view)
        self._groups: dict[_Names, dict[int, Sequence]] = {}  # by the adapters of its sequences, then by id
        self._group_of: dict[int, _Names] = {}
        self._may_change: dict[int, Sequence] = {}  # whose fallback may answer in the place of its adapters

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._join(sequence)
        if sequence.fallback is not None:
            self._may_change[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._leave(sequence)
        self._may_change.pop(sequence.sequence_id, None)

    def order(self, now: float) -> Iterator[Sequence]:
        self._regroup()
        here, near, cold = self._by_place()
        ready = sorted(chain.from_iterable(group.values() for group in here), key=self.key)
        rows = chain(ready, chain.from_iterable(_ordered(near)), chain.from_iterable(_ordered(cold)))
        aged = self._queue.aged(now)
        if not aged:
            return rows
        ids = {sequence.sequence_id for sequence in aged}
        return chain(aged, [sequence for sequence in rows if sequence.sequence_id not in ids])

    def prefetch_order(self, now: float) -> Iterator[Sequence]:
        """One sequence of each set of adapters that is not on the device: those of aged sequences first, then by
        arrival.
        """
        self._regroup()
        aged = self._queue.aged(now)
        _, near, cold = self._by_place()
        firsts = [next(iter(group.values())) for group in chain(near, cold)]
        ids = {sequence.sequence_id for sequence in aged}
        rest = [sequence for sequence in firsts if sequence.sequence_id not in ids]
        return chain(aged, sorted(rest, key=lambda sequence: sequence.sequence_id))

    def _by_place(self) -> tuple[list[dict[int, Sequence]], ...]:
        """The groups whose adapters are on the device, in host memory, and neither."""
        here: list[dict[int, Sequence]] = []
        near: list[dict[int, Sequence]] = []
        cold: list[dict[int, Sequence]] = []
        for group in self._groups.values():
            refs = next(iter(group.values())).refs
            if all(map(self.view.is_on_device, refs)):
                here.append(group)
            else:
                (near if all(map(self.view.is_on_host, refs)) else cold).append(group)
        return here, near, cold

    def _regroup(self) -> None:
        """Regroups sequences whose fallback answers now; the scheduler does not tell when."""
        for sequence in [s for s in self._may_change.values() if s.fell_back]:
            self._leave(sequence)
            self._join(sequence)
            del self._may_change[sequence.sequence_id]

    def _join(self, sequence: Sequence) -> None:
        names = tuple(sorted({use.ref.digest for use in sequence.adapters}))
        self._group_of[sequence.sequence_id] = names
        self._groups.setdefault(names, {})[sequence.sequence_id] = sequence

    def _leave(self, sequence: Sequence) -> None:
        names = self._group_of.pop(sequence.sequence_id)
        del self._groups[names][sequence.sequence_id]
        if not self._groups[names]:
            del self._groups[names]


def _ordered(groups: list[dict[int, Sequence]]) -> list[list[Sequence]]:
    """The largest group first; equal ones by first arrival. Copies, as sequences leave while they are read."""
    ranked = sorted(groups, key=lambda group: (-len(group), next(iter(group))))
    return [list(group.values()) for group in ranked]
