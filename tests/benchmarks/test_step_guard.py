"""The step guard's verdicts. That it bites on a slow kernel is tried by hand: see docs/explanation/performance.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import step_guard
from benchmarks.step_guard import REFERENCE, Reference, best, judge, kind_of_machine, ratios, worse

NAMES = ("distinct / base", "identical / base", "step / its products")
MARGINS = dict.fromkeys(NAMES, 0.1)
EXPECTED = dict.fromkeys(NAMES, 1.5)


def times(distinct: float, identical: float, base: float, gemms: float) -> dict[str, list[float]]:
    found = {"distinct": distinct, "identical": identical, "base": base, "gemms": gemms}
    return {name: [value] * 5 for name, value in found.items()}


def test_ratios_are_of_neighbouring_rounds() -> None:
    slow_then_fast = {"distinct": [20.0, 2.0], "identical": [11.0, 1.1], "base": [10.0, 1.0], "gemms": [5.0, 0.5]}
    assert ratios(slow_then_fast) == {
        "distinct / base": 2.0,
        "identical / base": 1.1,
        "step / its products": 2.0,
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_ratio_fails_above_its_margin_and_passes_within(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge({**EXPECTED, name: 1.64}, EXPECTED, MARGINS) == 0
    assert judge({**EXPECTED, name: 1.66}, EXPECTED, MARGINS) == 1
    assert f"margin: {name}." in capsys.readouterr().out


def test_unknown_kind_of_machine_is_shown_and_told_how_to_be_added(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(EXPECTED, None, MARGINS) == 0
    assert "scripts/step_guard --update" in capsys.readouterr().out


def test_what_got_better_is_asked_to_be_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge({**EXPECTED, NAMES[0]: 1.2}, EXPECTED, MARGINS) == 0
    assert "--update" in capsys.readouterr().out


def test_least_of_all_tries_counts() -> None:
    noisy = {**EXPECTED, NAMES[0]: 3.0}
    assert worse(noisy, EXPECTED, MARGINS) == [NAMES[0]]
    assert worse(best([noisy, EXPECTED]), EXPECTED, MARGINS) == []


def test_committed_reference_has_a_margin_for_every_ratio_of_every_kind() -> None:
    reference = Reference.read(REFERENCE)
    assert set(reference.margins) == set(NAMES)
    assert reference.kinds
    for kind, expected in reference.kinds.items():
        assert set(expected) == set(NAMES), kind
        assert len(kind.split()) == 3


def test_kind_names_instructions_type_and_kernel() -> None:
    instructions, dtype, kernel = kind_of_machine("float32").split()
    assert instructions in ("avx2", "avx512", "other")
    assert (dtype, kernel in ("native", "loop")) == ("float32", True)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A guard whose model costs what `series` says; its reference file."""
    file = tmp_path / "reference.json"
    Reference(MARGINS, {"avx2 float32 native": EXPECTED}).write(file)
    monkeypatch.setattr(step_guard, "kind_of_machine", lambda dtype: "avx2 float32 native")
    monkeypatch.setattr("sys.argv", ["step_guard", "--reference", str(file)])
    return file


def model_of(series: list[dict[str, list[float]]]) -> type:
    class Model:
        dtype = "float32"

        def __init__(self, folder: Path) -> None:
            self.left = list(series)

        def times(self, rounds: int) -> dict[str, list[float]]:
            return self.left.pop(0)

    return Model


SLOW, FINE = times(2.0, 1.5, 1.0, 0.66), times(1.5, 1.5, 1.0, 0.67)


def test_one_noisy_series_is_measured_again_and_passes(guard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_guard, "GuardedModel", model_of([SLOW, FINE]))
    assert step_guard.main() == 0


def test_what_is_slow_three_times_fails(guard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_guard, "GuardedModel", model_of([SLOW, SLOW, SLOW]))
    assert step_guard.main() == 1


def test_update_notes_the_ratios_of_this_kind_and_keeps_the_others(
    guard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Reference(MARGINS, {"other bfloat16 loop": EXPECTED}).write(guard)
    monkeypatch.setattr(step_guard, "GuardedModel", model_of([FINE]))
    monkeypatch.setattr("sys.argv", ["step_guard", "--update", "--reference", str(guard)])
    assert step_guard.main() == 0
    kinds = Reference.read(guard).kinds
    assert set(kinds) == {"other bfloat16 loop", "avx2 float32 native"}
    assert kinds["avx2 float32 native"]["distinct / base"] == 1.5
