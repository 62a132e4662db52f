"""The figures of fuzzing: those of all runs are added up, and each stands on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fuzz.__main__ import merged
from tests.fuzz.page import table

MACHINE = {"cores": 2, "cpu": "A processor", "date": "2026-11-26", "commit": "abc"}


def report_of(name: str, **figures: Any) -> dict[str, Any]:
    one = {"executions": 1000, "cpu_seconds": 60, "peak_rss_mb": 50, "starts": 7, "findings": [], **figures}
    return {"machine": MACHINE, "targets": {name: one}}


def test_runs_of_a_target_are_added_up_and_other_targets_stay(tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    for report in (report_of("tar"), report_of("zip", executions=5), report_of("tar", executions=200)):
        file.write_text(json.dumps(merged(file, report)))
    targets = json.loads(file.read_text())["targets"]
    assert targets["tar"]["executions"] == 200
    assert targets["tar"]["in_all"] == {"executions": 1200, "cpu_seconds": 120}
    assert targets["zip"]["in_all"] == {"executions": 5, "cpu_seconds": 60}


def test_table_has_the_sums_and_the_findings(tmp_path: Path) -> None:
    report = merged(
        tmp_path / "none.json", report_of("tar", executions=1234567, cpu_seconds=3600, findings=["crash-1"])
    )
    assert "| `tar` | 1 234 567 | 60 | 7 | 1 |" in table(report)
    assert table(report).endswith("2 cores of A processor, 2026-11-26, commit abc.")
