"""`lora-serve simulate`: exit codes, table, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_serve.cli import main
from lora_serve.simulate.fleet import Scenario, StalledError

ROOT = Path(__file__).resolve().parents[2]
TRACE = "benchmarks/traces/azure_code_2023_cut.csv"
SMALL = ["--trace", str(ROOT / TRACE), "--requests", "60", "--replicas", "2", "--rate", "20", "--adapters", "30"]


def test_it_prints_a_row_per_policy_and_router_and_writes_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert main(["simulate", *SMALL, "--policy", "fcfs", "--router", "hash", "affinity", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "| fcfs | hash |" in printed
    assert "| fcfs | affinity |" in printed
    report = json.loads(file.read_text())
    assert report["workload"]["num_adapters"] == 30
    assert [run["router"] for run in report["runs"]] == ["hash", "affinity"]
    assert all(run["num_requests"] == 60 and run["num_failed"] == 0 for run in report["runs"])


@pytest.mark.parametrize(
    "wrong", [["--trace", "/no/such/file"], ["--profile", "none"], ["--rate", "0"], ["--flood", "2"], ["--slots", "0"]]
)
def test_wrong_arguments_are_named_and_exit_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["simulate", *SMALL, *wrong])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert wrong[0] in capsys.readouterr().err


def test_requests_that_never_end_are_the_simulators_own_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stall(*arguments: object) -> None:
        raise StalledError("2 of 60 requests never end, the first is 7")

    monkeypatch.setattr(Scenario, "run", stall)
    assert main(["simulate", *SMALL, "--policy", "fcfs", "--router", "hash"]) == 1
    assert "fcfs, hash: 2 of 60 requests never end" in capsys.readouterr().err


@pytest.mark.nightly
def test_two_processes_with_other_hash_seeds_agree_on_every_figure(tmp_path: Path) -> None:
    reports = []
    for seed in ("1", "2"):
        file = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "lora_serve", "simulate", *SMALL, "--policy", "fcfs", "--json", str(file)]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment, capture_output=True, cwd=tmp_path)
        reports.append(json.loads(file.read_text()))
    assert reports[0] == reports[1]


def test_it_needs_no_torch_and_no_plots(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules.update(torch=None, matplotlib=None, transformers=None);"
        f"from lora_serve.cli import main; sys.exit(main({['simulate', *SMALL, '--policy', 'fcfs']!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
