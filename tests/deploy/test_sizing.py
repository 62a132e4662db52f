"""The figures of docs/deploy.md are the simulator's, whose runs are the same each time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.deploy.rendering import ROOT

PAGE = (ROOT / "docs" / "deploy.md").read_text()
RATES = re.findall(r"^\| (\d+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| ([\d ]+) \|$", PAGE, re.M)
SLOTS = re.findall(r"^\| (\d+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \|$", PAGE, re.M)


def simulated(report: Path, *changes: str) -> list[float]:
    """First tokens' p50 of both routers, their p99, tokens/s of the first; by the page's command and other flags."""
    found = re.search(r"^lora-serve (simulate .*?)^```", PAGE, re.M | re.S)
    assert found is not None
    words = [*found[1].replace("\\\n", " ").split(), *changes, "--json", str(report)]  # the last of equal flags counts
    subprocess.run([sys.executable, "-m", "lora_serve", *words], check=True, capture_output=True, cwd=ROOT, timeout=600)
    runs = {run["router"]: run for run in json.loads(report.read_text())["runs"]}
    both = (runs["affinity"], runs["least_loaded"])
    times = [run["ttft"][part] for part in ("p50", "p99") for run in both]
    return [*times, runs["affinity"]["output_tokens_per_s"]]


def assert_shown(row: Sequence[str], figures: Sequence[float]) -> None:
    """Each cell is its figure, rounded as the page has it."""
    for cell, figure in zip(row, figures, strict=False):
        digits = len(cell.partition(".")[2])
        assert abs(float(cell.replace(" ", "")) - figure) <= 0.5001 * 10**-digits, (row, figures)


def test_tables_say_what_is_said_of_them() -> None:
    assert [row[0] for row in RATES] == ["8", "24", "40", "48"]
    assert [row[0] for row in SLOTS] == ["8", "16", "32", "64"]
    for row in [*RATES, *SLOTS]:
        aware, least = float(row[1]), float(row[2])
        assert aware < least
    for row in RATES:
        assert 0.45 < float(row[1]) / float(row[2]) < 0.93  # a tenth to a half less
    assert SLOTS[2][1:] == SLOTS[3][1:]  # 32 were enough


@pytest.mark.nightly
@pytest.mark.parametrize("row", RATES, ids=lambda row: row[0])
def test_rates_are_the_simulators(row: Sequence[str], tmp_path: Path) -> None:
    assert_shown(row[1:], simulated(tmp_path / "report.json", "--rate", row[0]))


@pytest.mark.nightly
@pytest.mark.parametrize("row", SLOTS, ids=lambda row: row[0])
def test_slots_are_the_simulators(row: Sequence[str], tmp_path: Path) -> None:
    flags = "--adapters 1000 --tenants 100 --zipf 0.8 --rate 24 --slots"
    assert f"`{flags} 8`" in PAGE
    assert_shown(row[1:], simulated(tmp_path / "report.json", *flags.split(), row[0]))
