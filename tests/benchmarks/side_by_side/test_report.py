"""The table, the JSON and the picture of canned runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_by_side.options import parse_options
from benchmarks.side_by_side.plot import plot
from benchmarks.side_by_side.report import make_report, markdown
from tests.benchmarks.side_by_side.canned import run


def engine(name: str, status: str = "measured", reason: str = "") -> dict[str, Any]:
    told = {"engine": name, "family": name.partition("-")[0], "status": status, "reason": reason}
    return told | {"peak_rss": 1024**3, "start_s": 7.6}


@pytest.fixture
def report() -> dict[str, Any]:
    runs = [
        run("lora_serve", "base", 300),
        run("lora_serve", "uniform", 270),
        run("llama_cpp-f16", "uniform", 60),
        run("vllm-float32", "uniform", 54, failed=2),
    ]
    engines = [engine("lora_serve"), engine("llama_cpp-f16"), engine("vllm-float32")]
    engines += [engine("peft-float32", "failed", "No module named peft")]
    load = {"num_requests": 64, "concurrency": 16, "min_prompt_tokens": 16, "max_prompt_tokens": 256}
    load |= {"output_tokens": 64}
    facts = {"shape": "135m", "rounds": 5, "load": load, "machine": {"cores": 2, "cpu": "a processor"}}
    return make_report({**facts, "adapters": {"uniform": 16, "skewed": 32}}, engines, runs)


def test_the_table_has_a_row_for_each_engine_and_names_who_is_missing_and_why(report: dict[str, Any]) -> None:
    assert markdown(report).splitlines() == [
        "| engine | base | uniform | peak RSS | start |",
        "| --- | --- | --- | --- | --- |",
        "| lora_serve | 300, 0.0 s, 40 ms | 270, 0.0 s, 40 ms | 1.0 GiB | 8 s |",
        "| llama_cpp-f16 | - | 60, 0.0 s, 40 ms | 1.0 GiB | 8 s |",
        "| vllm-float32 | - | 54, 0.0 s, 40 ms, 2 failed | 1.0 GiB | 8 s |",
        "",
        "- uniform: 4.5 times llama_cpp-f16, 0.9 of base-only kept",
        "",
        "- not measured: peft-float32: failed, No module named peft",
    ]


def test_the_report_survives_json_with_every_run_and_ratio(report: dict[str, Any]) -> None:
    again = json.loads(json.dumps(report))
    assert again == report
    assert len(again["runs"]) == 4
    assert again["ratios"]["uniform"]["times vllm-float32"] == 5.0
    assert again["engines"][-1]["reason"] == "No module named peft"


def test_the_picture_is_drawn_from_the_report(report: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    is_drawn = plot(report, file)
    assert file.exists() == is_drawn
    if is_drawn:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_large_shapes_have_fewer_rounds_and_quick_has_one() -> None:
    assert parse_options([]).rounds == 5
    assert parse_options(["--rounds", "7"]).rounds == 7
    quick = parse_options(["--quick", "--rounds", "7"])
    assert (quick.rounds, quick.requests, quick.skewed_adapters) == (1, 16, 4)


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--engines", "nobody"])
    assert "nobody" in capsys.readouterr().err
