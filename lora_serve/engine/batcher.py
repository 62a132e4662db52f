"""When a batch starts and how large it may be: dynamic batching (a wait window) over a continuous batch.

The window opens with the first waiting request that could run. It closes early once `preferred_batch_size` of them
wait, or as many tokens as a step takes, or as many rows as there are places. Running and preempted rows never wait
for the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lora_serve.core.batch import StepLoad
from lora_serve.core.messages import Tune
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.core.stats import BatcherStats
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_cost import LatencyController, Running, StepCost, StepLimits

_ONLY = frozenset((0,))  # the only bucket, where rows are not padded


@dataclass(slots=True)
class _Gathered:
    num_rows: int = 0
    num_tokens: int = 0
    first: float = math.inf  # when the first of them could run


class Batcher:
    """Decides when waiting requests may start and how large a step may be."""

    def __init__(self, limits: BatchLimits, cost: StepCost, bucket_of: Callable[[Sequence], int] | None = None) -> None:
        """`bucket_of`: requests of different buckets cannot share a batch (rows that are padded to one length)."""
        self.limits = limits
        self.cost = cost
        self.controller = LatencyController(cost)
        self.is_bucketed = bucket_of is not None
        self.bucket_of = bucket_of or (lambda sequence: 0)

    def open_buckets(
        self, waiting: Iterable[Sequence], limits: StepLimits, num_running: int, budget: int, now: float
    ) -> frozenset[int]:
        """The buckets whose requests may start now. `budget`: tokens that running rows leave of this step."""
        if not self.is_bucketed:
            return self._open_without_buckets(waiting, limits, num_running, budget, now)
        return frozenset(
            bucket
            for bucket, gathered in self._by_bucket(waiting).items()
            if now >= self._closes_at(gathered) or self._is_full(gathered, limits, num_running, budget)
        )

    def opens_at(self, waiting: Iterable[Sequence], after: float) -> float | None:
        """The next time, in seconds of time.monotonic(), at which a window that was open at `after` closes; None: no
        window.
        """
        if self.limits.batch_wait == 0:
            return None
        ends = (self._closes_at(gathered) for gathered in self._by_bucket(waiting).values())
        return min((end for end in ends if end > after), default=None)

    def _open_without_buckets(
        self, waiting: Iterable[Sequence], limits: StepLimits, num_running: int, budget: int, now: float
    ) -> frozenset[int]:
        """Stops at the first request that closes the window: a long queue costs no more than a full batch."""
        if self.limits.batch_wait == 0:
            return _ONLY
        gathered = _Gathered()
        for sequence in waiting:
            if self._gather(gathered, sequence) and (
                now >= self._closes_at(gathered) or self._is_full(gathered, limits, num_running, budget)
            ):
                return _ONLY
        return frozenset()

    def _by_bucket(self, waiting: Iterable[Sequence]) -> dict[int, _Gathered]:
        found: dict[int, _Gathered] = {}
        for sequence in waiting:
            gathered = found.setdefault(self.bucket_of(sequence), _Gathered())
            self._gather(gathered, sequence)
        return {bucket: gathered for bucket, gathered in found.items() if gathered.num_rows}

    def _gather(self, gathered: _Gathered, sequence: Sequence) -> bool:
        """Counts a request; False if no window applies to it."""
        ready_at = sequence.ready_at
        if ready_at == math.inf or sequence.has_run:
            return False
        gathered.num_rows += 1
        gathered.num_tokens += max(sequence.num_remaining, self.bucket_of(sequence))
        gathered.first = min(gathered.first, ready_at)
        return True

    def _closes_at(self, gathered: _Gathered) -> float:
        return gathered.first + self.controller.window(self.limits, gathered.num_rows, gathered.num_tokens)

    def _is_full(self, gathered: _Gathered, limits: StepLimits, num_running: int, budget: int) -> bool:
        preferred = self.limits.preferred_batch_size
        return (
            (preferred is not None and gathered.num_rows >= preferred)
            or num_running + gathered.num_rows >= limits.max_rows
            or gathered.num_tokens >= budget
        )

    def step_limits(self, running: list[Sequence], num_waiting: int = 0) -> StepLimits:
        """The limits of the next step, in which all `running` requests have a row."""
        is_sized = self.limits.itl_target is not None or self.limits.prompt_stretch > 0
        load = running_of(running, num_waiting) if is_sized else Running(len(running))
        return self.controller.step_limits(self.limits, load)

    def tune(self, command: Tune) -> None:
        """Sets new limits, all or none. Raises InvalidRequestError for limits that contradict one another."""
        self.limits = command.applied_to(self.limits)

    def observe_step(self, load: StepLoad, seconds: float) -> None:
        """Learns from a step of this load that took `seconds`."""
        self.controller.observe_step(load, seconds, self.limits)
        self.cost.observe(load, seconds)

    def observe_first_token(self, seconds: float) -> None:
        self.controller.observe_first_token(seconds, self.limits)

    def observe_token(self, seconds: float) -> None:
        self.controller.observe_token(seconds, self.limits)

    def stats(self, running: list[Sequence]) -> BatcherStats:
        step, window = self.step_limits(running), self.controller.window(self.limits, 1, 1)
        ttft, itl = self.controller.ttft.p95(), self.controller.itl.p95()
        return BatcherStats(
            self.limits, step.max_rows, step.max_tokens, window, ttft, itl, self.cost.coefficients,
            self.cost.relative_error, reason_of(self.limits, step, window, ttft, itl),
        )  # fmt: skip


def running_of(running: list[Sequence], num_waiting: int = 0) -> Running:
    """The load that the next step has to run in any case."""
    under_way = [sequence.num_computed for sequence in running if not sequence.is_decoding]
    digests = {use.ref.digest for sequence in running for use in sequence.adapters}
    return Running(
        len(running), len(running) - len(under_way), sum(sequence.num_computed for sequence in running),
        max(under_way, default=0), len(digests), num_waiting,
    )  # fmt: skip


def padded_length(sequence: Sequence) -> int:
    """The bucket of a padded row: the next power of two, 16 at least."""
    return max(16, 1 << (sequence.num_remaining - 1).bit_length())


def reason_of(
    limits: BatchLimits, step: StepLimits, window: float, ttft_p95: float | None, itl_p95: float | None
) -> str:
    """Explains the limits in force, as in "smaller steps: between tokens 61 ms (p95), above the target of 50 ms"; one
    part per target, joined by "; ".
    """
    parts = [_of_itl(limits, step, itl_p95), _of_ttft(limits, window, ttft_p95)]
    return "; ".join(part for part in parts if part) or "no target is set: the limits are in force as they are"


def _of_itl(limits: BatchLimits, step: StepLimits, p95: float | None) -> str:
    if limits.itl_target is None:
        return ""
    is_tight = step.max_rows < limits.max_num_seqs or step.max_tokens < limits.max_num_batched_tokens
    what = f"between tokens {_against(p95, limits.itl_target)}"
    if not is_tight:
        return f"full steps: {what}"
    is_missed = p95 is not None and p95 > limits.itl_target
    return f"{'smaller steps' if is_missed else 'steps kept smaller'}: {what}"


def _of_ttft(limits: BatchLimits, window: float, p95: float | None) -> str:
    if limits.ttft_target is None:
        return ""
    what = f"first tokens {_against(p95, limits.ttft_target)}"
    if limits.batch_wait == 0:
        return f"no wait for a fuller batch: {what}"
    is_shorter = window < limits.batch_wait
    return f"wait for a fuller batch {'shortened to' if is_shorter else 'up to'} {_shown(window)}: {what}"


def _against(p95: float | None, target: float) -> str:
    if p95 is None:
        return f"not measured yet, the target is {_shown(target)}"
    return f"{_shown(p95)} (p95), {'above' if p95 > target else 'within'} the target of {_shown(target)}"


def _shown(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
