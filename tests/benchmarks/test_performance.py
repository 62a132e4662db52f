"""docs/explanation/performance.md says what the committed results say; what feeds it measures what it names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import evenness, registered
from benchmarks.aims import AIMS, aims_table
from benchmarks.performance import DOCUMENT, GROWTH, JOINT, README, STEP, TABLES, matching, read_reports, with_tables
from benchmarks.performance_tables import growth, growth_file
from benchmarks.start import arguments, memory_of, summary
from benchmarks.step_growth import PANELS
from benchmarks.step_growth_plot import TITLES
from benchmarks.workload import Sample


def part(text: str, name: str) -> str:
    return text.partition(f"<!-- begin {name} -->")[2].partition("<!-- end -->")[0]


def test_every_table_has_its_place_in_the_document() -> None:
    text = DOCUMENT.read_text()
    for name in (*TABLES, "aims", "beside", "latencies", "speculation"):
        assert text.count(f"<!-- begin {name} -->") == 1, name
    assert README.read_text().count("<!-- begin measured -->") == 1


def test_the_documents_tables_are_those_of_the_results() -> None:
    text, reports = DOCUMENT.read_text(), read_reports()
    assert all(matching(pattern, reports) for pattern, _ in (*TABLES.values(), *JOINT.values()))
    assert with_tables(text, reports) == text
    assert with_tables(README.read_text(), reports) == README.read_text()


def test_readme_names_the_processor_of_every_file_and_all_engines() -> None:
    reports = read_reports()
    first = reports["side-by-side.json"]
    machine = {**first["machine"], "cpu": "Another(R) Processor", "bf16_instructions": True, "commit": "abc1234"}
    other = {**first, "machine": machine, "dtype": "bfloat16"}
    text = with_tables(README.read_text(), {**reports, "side-by-side-zen4.json": other})
    table = part(text, "measured")
    where = "Another, 2 cores, with bf16 instructions"
    times = "114, 1.11 times its 103 | 95 (0.83 of base only), 2.66 times its 36"
    day = f"{first['date']}, commit abc1234"
    assert f"| {where}; bfloat16; {day} | llama.cpp (f16) | 135m, 5 rounds of 64 | {times} |" in table
    alone = {**first, "medians": [one for one in first["medians"] if one["engine"] == "lora_serve"]}
    alone["engines"] = [one for one in first["engines"] if one["engine"] == "lora_serve"]
    table = part(with_tables(README.read_text(), {"side-by-side.json": alone}), "measured")
    assert "| itself alone | 135m, 5 rounds of 64 | 114 | 95 (0.83 of base only) |" in table


def test_each_kind_of_processor_has_its_part_in_every_table_and_says_its_name_and_day() -> None:
    reports = read_reports()
    first = reports["step-avx2-float32.json"]
    machine = {**first["machine"], "cpu": "Another Processor", "kernels": "amx", "date": "2031-05-06"}
    other = {**first, "machine": machine}
    text = with_tables(DOCUMENT.read_text(), {**reports, "step-amx-bfloat16.json": other})
    for name in ("roofline", "parts"):
        assert part(text, name).index(first["machine"]["cpu"]) < part(text, name).index("Another Processor"), name
    assert "Another Processor, 2 cores, without bf16 instructions, kernels `amx`, float32, 2031-05-06" in text


def test_figures_that_were_asked_for_are_met_missed_or_not_measured_as_the_files_say() -> None:
    reports = read_reports()
    start = reports["start-amx.json"]
    aims = aims_table({"start-amx.json": {**start, "again_ready_s": 4.99, "peak_rss": 1_510_000_000}})
    assert "| /ready on a known store, 135M, 32 adapters | at most 5 s | 4.99 s | met |" in aims
    assert "| peak memory, 135M, 32 adapters | at most 1.5 GB | 1.51 GB | **missed** |" in aims
    assert aims.count("| not measured |") == len(AIMS) - 2
    beside = {**reports["side-by-side.json"], "machine": start["machine"]}
    aims = aims_table({"side-by-side.json": beside})
    assert "| 16 adapters in the batch, times the best peer | at least 4.5 | 2.66 | **missed** |" in aims
    without = aims_table({"side-by-side.json": reports["side-by-side.json"]})
    assert "2.66" not in without, "asked of processors with bf16 instructions alone"


def test_guessed_tokens_of_two_files_of_one_kind_are_one_table_and_other_answers_are_told() -> None:
    machine = read_reports()["start-amx.json"]["machine"]
    cell = {"case": "harbor/extract", "dtype": "float32", "prompts": 1000, "different_answers": 0}
    few, many = ({"machine": machine, "cells": [{**cell, "rows": rows, "ratio": rows / 8}]} for rows in (1, 16))
    text = DOCUMENT.read_text()
    found = part(with_tables(text, {"speculation-a.json": few, "speculation-b.json": many}), "speculation")
    assert "| tokens/s, `auto` over `off` | 1 row | 16 rows |" in found
    assert "| `harbor/extract` | 0.12 | 2.00 |" in found
    assert found.count("`harbor/extract`") == 1
    assert "0 of 2 000 answers differed" in found
    many["cells"][0]["different_answers"] = 7
    found = part(with_tables(text, {"speculation-a.json": few, "speculation-b.json": many}), "speculation")
    assert "7 of 2 000 answers differed" in found


def test_growth_is_told_beside_its_first_point_and_the_base() -> None:
    panel = {"x": [1, 1000], "series": {"base": [10.0, 30.0], "16 adapters": [15.0, 33.0]}}
    lines = growth("rows", "by rows", {"panels": {"rows": panel}}).splitlines()
    assert lines[0] == "| by rows | 1 | 1 000 |"
    assert lines[2:] == ["| base, times the first | 1.00 | 3.00 |", "| 16 adapters / base | 1.50 | 1.10 |"]


def test_files_of_one_table_stand_from_slow_to_fast_and_growth_is_another_table() -> None:
    names = [
        "step-amx-bfloat16.json",
        "step-amx-float32.json",
        "step-avx2-float32.json",
        "step-growth-amx-float32.json",
    ]
    assert matching(STEP, names) == [names[2], names[1], names[0]]
    assert matching(GROWTH, names) == [names[3]]


def test_every_panel_that_is_measured_is_drawn_and_listed() -> None:
    panels = {*PANELS, "registered"}
    assert panels == set(TITLES) <= set(TABLES)
    reports = read_reports()
    for name in matching(GROWTH, reports):
        assert set(reports[name]["panels"]) == panels
        assert DOCUMENT.with_name(growth_file(reports[name])).exists()


def test_tail_ratio_is_p99_over_p50_and_nothing_measured_never_passes() -> None:
    even, uneven = Sample(0.1, (0.01,) * 100, ()), Sample(0.1, (0.05,) * 4, ())
    assert evenness.tail_ratio_of([even]) == pytest.approx(1.0)
    assert evenness.tail_ratio_of([even, uneven]) == pytest.approx(5.0)
    assert evenness.tail_ratio_of([]) == float("inf")


def test_inter_token_times_are_found_in_one_report_and_in_many_runs() -> None:
    run = {"engine": "lora_serve", "popularity": "base", "itl_ms": {"p50": 10.0, "p90": 12.0, "p99": 19.0}}
    for report in (run, {"runs": [run]}, {"medians": [run], "runs": [run, run]}):
        assert list(evenness.itl_of(report)) == [("lora_serve base", run["itl_ms"])]


def test_evenness_fails_above_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    file.write_text('{"engine": "lora_serve", "itl_ms": {"p50": 10.0, "p99": 19.0}}')
    monkeypatch.setattr("sys.argv", ["evenness", str(file)])
    assert evenness.main() == 0
    monkeypatch.setattr("sys.argv", ["evenness", str(file), "--limit", "1.5"])
    assert evenness.main() == 1


def test_registered_adapters_are_resolved_and_served_by_the_real_tables() -> None:
    found = registered.measure(20)
    assert found["loads per request, all on the host"] == 0
    assert found["loads per request, a fifth on the host"] > 0  # 9 of 20 fit: 8 slots and one more
    assert all(value > 0 for name, value in found.items() if not name.startswith("loads"))


def test_memory_of_a_process_is_its_resident_bytes_and_never_above_the_peak() -> None:
    now, peak = (memory_of(os.getpid(), field) for field in ("VmRSS", "VmHWM"))
    assert 10**7 < now <= peak


def test_server_of_the_start_benchmark_has_the_stated_budget_and_flags_that_exist(tmp_path: Path) -> None:
    from lora_serve.core.settings import load_settings

    (tmp_path / "config.json").write_text("{}")
    settings = load_settings(arguments(tmp_path, {"bench/a00": tmp_path}, tmp_path, 32))
    assert (settings.kv_cache_memory, settings.max_loras) == (256 * 10**6, 32)
    assert settings.lora_modules == (f"bench/a00={tmp_path}",)


def test_start_summary_takes_medians_of_times_and_the_largest_peak() -> None:
    starts = [
        {"first": {"ready_s": s}, "again": {"ready_s": s / 2, "ready_cpu_s": s / 4, "peak_rss": peak, "failed": 0}}
        for s, peak in ((8.0, 5), (4.0, 9), (6.0, 7))
    ]
    assert summary(starts) == {
        "first_ready_s": 6.0,
        "again_ready_s": 3.0,
        "again_ready_cpu_s": 1.5,
        "peak_rss": 9,
        "failed": 0,
    }
