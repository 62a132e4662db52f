"""A fleet under load while its replicas, gateways, network or Redis are broken: no wrong answer, no request lost.

The oracle is one engine alone, in a process that knows nothing of Ray (benchmarks/fleet).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fleet import faults, network

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("fault", "seconds", "more"),
    [
        ("kill", 45, ()),
        ("hang", 40, ()),
        ("gateway", 30, ("--gateways", "2")),
        ("redis", 40, ()),
        ("update", 90, ()),
        ("scale", 120, ()),
    ],
)
def test_fleet_under_load_answers_right_whatever_is_broken(
    tmp_path: Path, fault: str, seconds: int, more: tuple[str, ...]
) -> None:
    out = tmp_path / "report.json"
    load = ["--fault", fault, "--seconds", str(seconds), "--adapters", "12", *more]
    code = faults.main([*load, "--scratch", str(tmp_path), "--out", str(out)])
    report = json.loads(out.read_text())
    assert (report["failures"], code) == ([], 0)
    assert report["events"]  # it was broken indeed
    assert report["counts"]["right"] > 50


def test_hosts_that_are_cut_apart_agree_again_and_nobody_was_answered_wrong(tmp_path: Path) -> None:
    """Makes network namespaces: run by root."""
    out = tmp_path / "report.json"
    code = network.main(["--adapters", "8", "--scratch", str(tmp_path), "--out", str(out)])
    report = json.loads(out.read_text())
    assert (report["failures"], code) == ([], 0)
    assert [cut["hosts"] for cut in report["cuts"]] == [["a", "b"], ["a", "g"], ["b", "g"]]
    assert report["counts"]["right"] > 50
