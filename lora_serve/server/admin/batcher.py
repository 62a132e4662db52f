"""The batcher's part of GET /admin/engine, under the names that PUT /admin/engine takes."""

from __future__ import annotations

from typing import Any

from lora_serve.core.stats import BatcherStats


def batcher_card(stats: BatcherStats | None) -> dict[str, Any] | None:
    """None: the engine does not tell. Times in ms, coefficients in microseconds."""
    if stats is None:
        return None
    limits = stats.limits
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "batch_wait_ms": _ms(limits.batch_wait),
        "preferred_batch_size": limits.preferred_batch_size,
        "latency_target_ms": _ms(limits.ttft_target),
        "inter_token_target_ms": _ms(limits.itl_target),
        "in_force": {
            "max_num_seqs": stats.max_rows,
            "max_num_batched_tokens": stats.max_tokens,
            "batch_wait_ms": _ms(stats.window),
        },
        "measured": {"ttft_p95_ms": _ms(stats.ttft_p95), "inter_token_p95_ms": _ms(stats.itl_p95)},
        "step_cost_us": {name: round(1e6 * seconds, 4) for name, seconds in stats.cost.items()},
        "step_cost_error": None if stats.cost_error is None else round(stats.cost_error, 3),
        "reason": stats.reason,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
