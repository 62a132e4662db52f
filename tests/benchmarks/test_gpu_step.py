"""The GPU benchmark's parts that need no GPU: its world runs, its floor counts bytes once, without CUDA it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu_world import SHAPES, load, make_world, random_adapter
from lora_serve.model.lora.host_adapter import in_arena

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_world_decodes_and_its_floor_counts_every_byte_once() -> None:
    world = make_world("tiny", CPU, 2, 5, 4, 1, block_size=4, lora_kernel="loop")
    adapter = random_adapter(world.spec, "d", 3, CPU, torch.float32)
    row_adapter = load(world, 0, 1, adapter)
    for step in range(world.steps):
        outputs = world.runner.run(world.batch(step, [row_adapter, None]))
        assert [output.error for output in outputs] == [None, None]
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES["tiny"]
    kv = hidden // heads * kv_heads
    projections = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate
    base = 4 * (layers * (projections + 2 * hidden) + hidden + vocabulary * hidden)
    base += 4 * 2 * (hidden // heads // 2)  # RoPE's frequencies, which transformers keeps twice
    assert world.base_bytes == base
    num_features = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + intermediate)
    assert adapter.num_bytes == 4 * 3 * layers * num_features
    assert world.kv_bytes(2) == 2 * (5 + 2) * layers * 2 * kv * 4
    assert gpu_step.floor_bytes(world, 2, adapter.num_bytes) == base + adapter.num_bytes + world.kv_bytes(2)


def test_traffic_loads_an_adapter_once_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "ROWS", 6)
    monkeypatch.setattr(gpu_step, "SLOTS", 8)
    monkeypatch.setattr(gpu_step, "LIFETIME", 6)
    world = make_world("tiny", CPU, 6, 5, 30, 8, block_size=4, lora_kernel="loop")
    adapter = random_adapter(world.spec, "d", 3, CPU, torch.float32)
    few, many = (gpu_step.Traffic(world, [in_arena(adapter, world.spec.linears, pin=False)], n) for n in (2, 50))
    for traffic in (few, many):
        for step in range(world.steps):
            outputs = world.runner.run(world.batch(step, traffic.adapters(step)))
            assert all(output.error is None for output in outputs)
    assert few.num_loads == 2
    assert many.num_loads > 8


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpu_step", "gpu_tiles", "gpu_report"])
def test_without_cuda_it_says_so_and_exits_3(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_report_measures_all_that_a_cpu_can_run_and_keeps_what_an_earlier_call_found(tmp_path: Path) -> None:
    def report(*arguments: str) -> dict[str, Any]:
        file = tmp_path / "report.json"
        command = [sys.executable, "-m", "benchmarks.gpu_report", "--device", "cpu", "--out", str(file), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    parts = ("truth", "step", "kinds", "rest")
    found = report(*parts)
    figures = [value for part in parts for value in found[part].values()]
    assert len(figures) > 25
    assert all(isinstance(value, dict) and "error" not in value for value in figures)
    assert all(found["truth"][name]["launches"] > 0 for name in found["truth"] if name.startswith("profile"))
    again = report("--seconds", "0")
    assert all(again[part] == found[part] for part in parts)
    assert set(again["server"].values()) == {"not run: no time was left"}
