"""What the simulator's benchmarks compute, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.record_steps import fit, profile_text
from benchmarks.simulation import COMPARISONS, DOCUMENT, with_tables
from benchmarks.simulator_check import compare, figures
from lora_serve.simulate.profiles import read_profile


def test_a_transfer_that_grows_with_size_is_fitted_and_one_that_does_not_is_its_median() -> None:
    found = fit([(size, 0.01 + size / 1e8) for size in (10_000_000, 20_000_000, 40_000_000)])
    assert found == {"per_load": pytest.approx(0.01), "bytes_per_second": pytest.approx(1e8, rel=1e-3)}
    assert fit([(10, 0.3), (20, 0.2), (30, 0.1)]) == {"per_load": 0.2, "bytes_per_second": 1e12}
    assert fit([(10, 0.3), (10, 0.1)])["per_load"] == pytest.approx(0.2)


def test_a_recorded_profile_is_read_back(tmp_path: Path) -> None:
    facts = json.loads((DOCUMENT.parents[2] / "lora_serve/simulate/profiles/demo-cpu.json").read_text())
    file = tmp_path / "again.json"
    file.write_text(profile_text(facts))
    assert json.loads(file.read_text()) == facts
    assert read_profile(str(file)).max_loras == facts["limits"]["max_loras"]


def test_every_comparison_has_its_place_in_the_document() -> None:
    text = DOCUMENT.read_text()
    for name in COMPARISONS:
        assert f"<!-- begin {name} -->" in text
    assert with_tables(text, {}) == text


def test_the_documents_tables_are_those_of_the_results() -> None:
    text = DOCUMENT.read_text()
    results = json.loads((DOCUMENT.parents[2] / "benchmarks/results/simulation.json").read_text())
    assert set(results) == set(COMPARISONS)
    assert with_tables(text, results) == text


@pytest.mark.parametrize(("factor", "is_within"), [(1.0, True), (1.24, True), (1.3, False), (0.7, False)])
def test_the_check_passes_only_within_its_tolerance(factor: float, is_within: bool) -> None:
    measured = figures([0.1, 0.2, 0.3], 100, 10.0)
    simulated = figures([factor * seconds for seconds in (0.1, 0.2, 0.3)], 100, 10.0)
    assert compare(simulated, measured, 0.25)["is_within_tolerance"] is is_within
