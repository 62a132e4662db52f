"""Why the limits in force are what they are, in words for the admin."""

from __future__ import annotations

from lora_serve.core.config import BatchLimits
from lora_serve.engine.batching.latency_controller import StepLimits


def reason_of(
    limits: BatchLimits, step: StepLimits, window: float, ttft_p95: float | None, itl_p95: float | None
) -> str:
    """ "tightened: itl p95 61 ms > 50 ms"; the parts for the two targets are joined by "; "."""
    parts = [_of_itl(limits, step, itl_p95), _of_ttft(limits, window, ttft_p95)]
    return "; ".join(part for part in parts if part) or "no target is set: the limits are in force as they are"


def _of_itl(limits: BatchLimits, step: StepLimits, p95: float | None) -> str:
    if limits.itl_target is None:
        return ""
    is_tight = step.max_rows < limits.max_num_seqs or step.max_tokens < limits.max_num_batched_tokens
    what = f"itl p95 {_ms(p95)} {_relation(p95, limits.itl_target)} {_ms(limits.itl_target)}"
    if not is_tight:
        return f"steps open: {what}"
    is_missed = p95 is not None and p95 > limits.itl_target
    return f"{'tightened' if is_missed else 'steps held'}: {what}"


def _of_ttft(limits: BatchLimits, window: float, p95: float | None) -> str:
    if limits.ttft_target is None:
        return ""
    what = f"ttft p95 {_ms(p95)} {_relation(p95, limits.ttft_target)} {_ms(limits.ttft_target)}"
    if limits.batch_wait == 0:
        return f"no window: {what}"
    return f"{'window held' if window < limits.batch_wait else 'window open'} at {_ms(window)}: {what}"


def _relation(p95: float | None, target: float) -> str:
    return ">" if p95 is not None and p95 > target else "<="


def _ms(seconds: float | None) -> str:
    return "(none yet)" if seconds is None else f"{1000 * seconds:.3g} ms"
