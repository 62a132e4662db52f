"""How many replicas a load needs. Ray Serve's context is a plain object here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lora_serve.core.replica_report import ReplicaReport
from lora_serve.engine_host.fleet.autoscaling import LOAD, replicas_wanted
from lora_serve.engine_host.fleet.replica_engine import ReplicaEngine


def wanted(*reports: ReplicaReport) -> int:
    loads = [ReplicaEngine.load.fget(SimpleNamespace(_last_report=report)) for report in reports]  # type: ignore[attr-defined]
    context = SimpleNamespace(
        aggregated_metrics={LOAD: {str(index): load[LOAD] for index, load in enumerate(loads)}},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        policy_state=None,
    )
    return replicas_wanted(context)[0]


@pytest.mark.parametrize(
    ("running", "waiting", "tokens", "replicas"),
    [(0, 0, 0, 1), (8, 0, 0, 1), (8, 126, 126 * 20, 3), (8, 2, 9000, 3), (64, 900, 90000, 4)],
    ids=["idle", "no queue", "many short prompts", "two long prompts", "more than there may be"],
)
def test_replicas_are_wanted_by_what_is_to_be_computed(running: int, waiting: int, tokens: int, replicas: int) -> None:
    report = ReplicaReport("r", 0.0, num_running=running, num_waiting=waiting, waiting_tokens=tokens)
    assert wanted(report) == replicas
