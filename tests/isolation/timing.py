"""What the times of two kinds of answers tell: how often a guess by the time alone would be right."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_AUC = 0.55  # half is a guess in the dark
SURE = 0.99
_RESAMPLES = 200


@dataclass(frozen=True)
class Told:
    """The area under the curve of a guesser who knows two kinds of times, whichever of them is the longer one."""

    auc: float  # 0.5: nothing is told; 1: all
    at_most: float  # with the certainty SURE, from rounds drawn anew (bootstrap)


def told(one: NDArray[np.int64], other: NDArray[np.int64]) -> Told:
    """Of times that were taken in rounds of one each."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, len(one), len(one)) for _ in range(_RESAMPLES)]
    again = sorted(_either_way(auc(one[rounds], other[rounds])) for rounds in drawn)
    return Told(_either_way(auc(one, other)), again[int(SURE * _RESAMPLES)])


def auc(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """The share of pairs in which the other time is the longer one; equal ones count half (Mann and Whitney)."""
    _, places, counts = np.unique(np.concatenate([one, other]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    num_one, num_other = len(one), len(other)
    return float((ranks[num_one:].sum() - num_other * (num_other + 1) / 2) / (num_one * num_other))


def taken_in_turns(
    acts: Mapping[str, Callable[[], object]],
    num_rounds: int,
    before: Callable[[], object] = lambda: None,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, NDArray[np.int64]]:
    """Nanoseconds of the processor for each act, one of each a round, in an order of chance. A stranger who measures
    sees these and the waits of the machine, which only hide them. `before`: called at the begin of each round,
    `prepare` before each act with its name.
    """
    rng, names = random.Random(0), list(acts)
    times: dict[str, list[int]] = {name: [] for name in names}
    with _without_collector():
        for _ in range(num_rounds):
            before()
            rng.shuffle(names)
            for name in names:
                act = acts[name]
                prepare(name)
                began = time.thread_time_ns()
                act()
                times[name].append(time.thread_time_ns() - began)
    return {name: np.array(taken) for name, taken in times.items()}


async def answered_in_turns(
    asks: Mapping[str, Callable[[], Awaitable[object]]], num_rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, NDArray[np.int64]]:
    """The same of requests to a server on this thread, each with its answer."""
    rng, names = random.Random(0), list(asks)
    times: dict[str, list[int]] = {name: [] for name in names}
    with _without_collector():
        for _ in range(num_rounds):
            before()
            rng.shuffle(names)
            for name in names:
                began = time.thread_time_ns()
                await asks[name]()
                times[name].append(time.thread_time_ns() - began)
    return {name: np.array(taken) for name, taken in times.items()}


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _either_way(area: float) -> float:
    return max(area, 1.0 - area)
