"""docs/explanation/performance.md says what the committed results say; what feeds it measures what it names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import evenness, registered
from benchmarks.performance import DOCUMENT, GROWTH, README, STEP, TABLES, matching, read_reports, with_tables
from benchmarks.performance_tables import growth_file
from benchmarks.start import arguments, memory_of, summary
from benchmarks.step_growth import PANELS
from benchmarks.step_growth_plot import TITLES
from benchmarks.workload import Sample


def test_every_table_has_its_place_in_the_document() -> None:
    text = DOCUMENT.read_text()
    for name in (*TABLES, "beside"):
        assert text.count(f"<!-- begin {name} -->") == 1, name
    assert README.read_text().count("<!-- begin measured -->") == 1


def test_the_documents_tables_are_those_of_the_results() -> None:
    text, reports = DOCUMENT.read_text(), read_reports()
    assert all(matching(pattern, reports) for pattern, _ in TABLES.values())
    assert with_tables(text, reports) == text
    assert with_tables(README.read_text(), reports) == README.read_text()


def test_readmes_table_names_the_processor_of_every_file_and_all_engines() -> None:
    reports = read_reports()
    first = reports["side-by-side.json"]
    other = {**first, "machine": {**first["machine"], "cpu": "Another Processor", "bf16_instructions": True}}
    text = with_tables(README.read_text(), {**reports, "side-by-side-amx-bfloat16.json": other})
    part = text.partition("<!-- begin measured -->")[2].partition("<!-- end -->")[0]
    assert "| Another Processor, 2 cores, with bf16 instructions | lora_serve | 5 x 64, 135m | 114 tokens/s" in part
    assert part.count("| llama_cpp-f16 |") == 2
    assert "peft" not in part


def test_each_kind_of_processor_has_its_part_in_every_table_and_says_its_name() -> None:
    reports = read_reports()
    first = reports["step-avx2-float32.json"]
    other = {**first, "machine": {**first["machine"], "cpu": "Another Processor", "kernels": "amx"}}
    text = with_tables(DOCUMENT.read_text(), {**reports, "step-amx-bfloat16.json": other})
    for name in ("roofline", "ratios", "parts", "operators"):
        part = text.partition(f"<!-- begin {name} -->")[2].partition("<!-- end -->")[0]
        assert part.index(first["machine"]["cpu"]) < part.index("Another Processor"), name


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
