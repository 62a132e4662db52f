"""Cases that are timed in turn, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Case = Callable[[], object]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
CLOCK_HELP = "processor: this process's own time, for one thread on a busy machine; with more threads it is their sum"
WARM_ROUNDS = 2  # not counted


def time_alternating(
    cases: Mapping[str, Case], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds by `clock` of every round of each case."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(rounds + WARM_ROUNDS):
        for name, case in cases.items():
            start = clock()
            case()
            if index >= WARM_ROUNDS:
                times[name].append(clock() - start)
    return times


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds of one case's time by another's."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
