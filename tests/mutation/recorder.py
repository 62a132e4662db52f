"""A plugin of pytest: notes what came of each test, and tells coverage which test runs.

A line of JSON each, in the file that MUTATION_RECORD names: a test's id, seconds with its fixtures, whether it failed,
and whether it did so by its time limit. A file that cannot be imported is noted as a test of that name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_seconds: dict[str, float] = {}
_failed: dict[str, str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    coverage = sys.modules.get("coverage")
    measuring = coverage.Coverage.current() if coverage is not None else None
    if measuring is not None:
        measuring.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        if measuring is not None:
            measuring.switch_context("")
        _note(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed:
        _failed.setdefault(report.nodeid, report.longreprtext)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _failed[report.nodeid] = report.longreprtext
        _note(report.nodeid)


def _note(test: str) -> None:
    error = _failed.get(test)
    line: dict[str, Any] = {"test": test, "seconds": round(_seconds.get(test, 0.0), 4), "failed": error is not None}
    if error is not None:
        line["hang"] = "Timeout (>" in error
        line["error"] = error[-2000:]
    with Path(os.environ["MUTATION_RECORD"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
