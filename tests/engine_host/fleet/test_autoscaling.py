"""How many replicas a load needs; Ray Serve's own context is what the policy gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lora_serve.core.replica_report import ReplicaReport
from lora_serve.engine_host.fleet.autoscaling import TOKENS_PER_REPLICA, load, replicas_wanted
from lora_serve.engine_host.fleet.replica_engine import ReplicaEngine


def wanted(*loads: dict[str, float], least: int = 1, most: int = 8, now: int = 1) -> int:
    names = {key for one in loads for key in one}
    metrics = {name: {str(index): one[name] for index, one in enumerate(loads)} for name in names}
    context = SimpleNamespace(
        aggregated_metrics=metrics or None,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
        target_num_replicas=now,
        policy_state={"kept": 1},
    )
    number, state = replicas_wanted(context)
    assert state == {"kept": 1}
    return number


@pytest.mark.parametrize(
    ("loads", "number"),
    [
        ((), 1),
        ((load(0, 0),), 1),
        ((load(TOKENS_PER_REPLICA, 0),), 1),
        ((load(TOKENS_PER_REPLICA + 1, 0),), 2),
        ((load(3 * TOKENS_PER_REPLICA, 0), load(0, 0)), 3),
        ((load(0, 100), load(0, 100)), 4),
        ((load(100 * TOKENS_PER_REPLICA, 0),), 8),
    ],
)
def test_waiting_prompts_and_running_rows_want_replicas(loads: tuple[dict[str, float], ...], number: int) -> None:
    assert wanted(*loads) == number


def test_bounds_of_the_deployment_hold() -> None:
    assert wanted(load(0, 0), least=3) == 3
    assert wanted(load(10**9, 0), most=2) == 2


def test_one_replica_less_is_wanted_at_a_time() -> None:
    """Serve asks at the end of its delay, maybe at a moment without load, and takes the answer as it is."""
    assert [wanted(load(0, 0), most=16, now=now) for now in (16, 15, 2, 1)] == [15, 14, 1, 1]
    assert wanted(load(3 * TOKENS_PER_REPLICA, 0), now=8) == 7
    assert wanted(load(7 * TOKENS_PER_REPLICA, 0), now=2) == 7
    assert wanted(load(0, 0), now=8, most=4) == 4


def test_queue_of_short_prompts_wants_replicas_too() -> None:
    report = ReplicaReport("r", 0.0, num_running=8, num_waiting=126, waiting_tokens=126 * 20)
    told = ReplicaEngine.load.fget(SimpleNamespace(_last_report=report))  # type: ignore[attr-defined]
    assert wanted(told) == 3
