"""Looks for an order of all operations on one object that explains every answer: linearizability, and weaker promises.

The search is Wing and Gong's with Lowe's memory of (operations done, state), as in Knossos and Porcupine ("Testing for
linearizability", Lowe 2017). What must come before what is given as a relation, so that a read may be allowed to be as
old as is promised and no older: an operation comes after all that had returned before its `since`, and after all that
its own replica had answered before it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

State = Hashable
# From a state and an act to the state after it and the answer; the same state if the act was refused or only looks.
Model = Callable[[Any, tuple[Any, ...]], tuple[State, Any]]
NEVER = math.inf
MAX_TRIED = 100_000  # states of a search


@dataclass(frozen=True)
class Operation:
    """One act on one object, as a client saw it. Times are seconds of one clock.

    `since`: the oldest moment whose state may have answered. `changes` False: it was refused, or only looked.
    `is_known` False: nobody knows whether it was done; if so, then not after `returned`.
    """

    replica: int
    act: tuple[Any, ...]
    invoked: float
    returned: float
    answer: Any
    changes: bool
    since: float
    is_known: bool = True


@dataclass(frozen=True)
class Verdict:
    """`stuck`: the operations that no order explains after the longest one that was found; empty: all is explained."""

    stuck: tuple[Operation, ...]
    state: Any
    num_tried: int

    @property
    def is_right(self) -> bool:
        return not self.stuck


def check(operations: Sequence[Operation], model: Model, initial: State) -> Verdict:
    """Searches for an order. A read that fits is taken at once: it changes nothing, so no order is lost by that.

    Raises TimeoutError for a history that is too hard.
    """
    search = _Search(operations, model)
    stack: list[tuple[int, Any]] = [(0, initial)]
    seen: set[tuple[int, State]] = set()
    best, best_state = -1, initial
    while stack:
        done, state = stack.pop()
        done = search.with_reads(done, state)
        if not search.needed & ~done:
            return Verdict((), state, len(seen))
        if (done, state) in seen:
            continue
        seen.add((done, state))
        if len(seen) > MAX_TRIED:
            raise TimeoutError(f"no order of {len(operations)} operations was found, nor that there is none")
        if best < 0 or (done & search.needed).bit_count() > (best & search.needed).bit_count():
            best, best_state = done, state
        stack += search.next(done, state)
    stuck = [one for _, one in search.ready(best) if one.is_known]
    return Verdict(tuple(stuck), best_state, len(seen))


class _Search:
    def __init__(self, operations: Sequence[Operation], model: Model) -> None:
        self._ordered = sorted(operations, key=lambda one: one.since)
        self._model = model
        self._before = [self._mask(lambda other, one=one: _is_before(other, one)) for one in self._ordered]
        self._too_late = [self._mask(lambda other, one=one: other.since > one.returned) for one in self._ordered]
        self.needed = self._mask(lambda one: one.is_known)

    def _mask(self, belongs: Callable[..., bool]) -> int:
        return sum(1 << i for i, one in enumerate(self._ordered) if belongs(one))

    def ready(self, done: int) -> Iterator[tuple[int, Operation]]:
        """What may come next, with its place."""
        earliest = NEVER
        first = (~done & (done + 1)).bit_length() - 1
        for i in range(first, len(self._ordered)):
            if done >> i & 1:
                continue
            one = self._ordered[i]
            if one.since > earliest:
                return
            earliest = min(earliest, one.returned) if one.is_known else earliest
            if not self._before[i] & ~done and not self._too_late[i] & done:
                yield i, one

    def with_reads(self, done: int, state: Any) -> int:
        while more := sum(
            1 << i for i, one in self.ready(done) if not one.changes and self._model(state, one.act)[1] == one.answer
        ):
            done |= more
        return done

    def next(self, done: int, state: Any) -> list[tuple[int, Any]]:
        """What may follow; acts of unknown end come first, so that they are tried last."""
        known, unknown = [], []
        for i, one in self.ready(done):
            if not one.changes:
                continue
            after, answer = self._model(state, one.act)
            if not one.is_known and after != state:
                unknown.append((done | 1 << i, after))
            elif one.is_known and answer == one.answer:
                known.append((done | 1 << i, after))
        return unknown + known


def _is_before(one: Operation, other: Operation) -> bool:
    is_seen_there = one.replica == other.replica and one.returned < other.invoked
    return one.is_known and (one.returned < other.since or is_seen_there)
