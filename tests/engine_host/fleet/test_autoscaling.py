"""How many replicas a load needs; Ray Serve's own context is what the policy gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from lora_serve.core.stats import ReplicaReport
from lora_serve.engine_host.fleet.app import DOWNSCALE_SECONDS
from lora_serve.engine_host.fleet.ray_hooks import LOAD, TOKENS_PER_REPLICA, load, replicas_wanted
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


def test_serve_takes_a_replica_after_each_delay_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own code around the policy, as its controller calls it each second."""
    from ray.serve import autoscaling_policy

    now, target, state = 0.0, 4, {}
    monkeypatch.setattr(autoscaling_policy.time, "time", lambda: now)
    around = autoscaling_policy._apply_autoscaling_config(replicas_wanted)
    config = AutoscalingConfig(min_replicas=1, max_replicas=8, downscale_delay_s=DOWNSCALE_SECONDS, upscale_delay_s=5.0)
    history = []
    for second in range(1000):
        now = float(second)
        told = {"one": 3.5 * TOKENS_PER_REPLICA} if second == 0 else {"one": 0.0}
        context = SimpleNamespace(
            aggregated_metrics={LOAD: told},
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=8,
            target_num_replicas=target,
            current_num_replicas=target,
            total_num_requests=0,
            policy_state=state,
            config=config,
        )
        wanted, state = around(context)
        if wanted != target:
            history.append((second, target := wanted))
    assert [number for _, number in history] == [3, 2, 1]
    moments = [second for second, _ in history]
    assert all(later - sooner >= DOWNSCALE_SECONDS for sooner, later in zip([0, *moments], moments, strict=False))


def test_queue_of_short_prompts_wants_replicas_too() -> None:
    report = ReplicaReport("r", 0.0, num_running=8, num_waiting=126, waiting_tokens=126 * 20)
    told = ReplicaEngine.load.fget(SimpleNamespace(_last_report=report))  # type: ignore[attr-defined]
    assert wanted(told) == 3
