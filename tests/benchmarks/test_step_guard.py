"""The step guard's verdicts: on references, on a commit, and on machines that have neither."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import against_commit, step_guard
from benchmarks.against_commit import NoComparisonError, commit_before, ratios_against
from benchmarks.step_guard import DTYPES, REFERENCE, Limits, Reference, best, kind_of_machine, ratios
from lora_serve.commands.bench.report import machine, processor_words
from lora_serve.model.native import compiler

NAMES = ("distinct / base", "identical / base", "step / its products")
MARGINS = dict.fromkeys(NAMES, 0.1)
EXPECTED = dict.fromkeys(NAMES, 1.5)
KIND = "avx2 float32 native"
LIMITS = Limits(KIND, "the reference", EXPECTED, MARGINS)


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
def test_each_ratio_fails_above_its_margin_and_passes_within(name: str) -> None:
    within, above = (LIMITS.judge({**EXPECTED, name: ratio}) for ratio in (1.64, 1.66))
    assert (within.has_failed, within.words) == (False, f"{KIND} is within the margins of the reference")
    assert (above.has_failed, above.words) == (True, f"{KIND} is above the reference by more than the margin: {name}")


def test_what_got_better_is_asked_to_be_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert not LIMITS.judge({**EXPECTED, NAMES[0]: 1.2}).has_failed
    assert "--update" in capsys.readouterr().out


def test_lower_ratios_of_a_slower_base_are_not_called_better(capsys: pytest.CaptureFixture[str]) -> None:
    assert not LIMITS.judge({**EXPECTED, NAMES[0]: 1.2, NAMES[2]: 1.62}).has_failed
    assert "--update" not in capsys.readouterr().out


def test_least_of_all_tries_counts() -> None:
    noisy = {**EXPECTED, NAMES[0]: 3.0}
    assert LIMITS.exceeded(noisy) == [NAMES[0]]
    assert LIMITS.exceeded(best([noisy, EXPECTED])) == []


def test_committed_reference_has_a_margin_for_every_ratio_of_every_kind() -> None:
    reference = Reference.read(REFERENCE)
    assert set(reference.margins) == set(NAMES)
    assert reference.kinds
    assert set(reference.processors) == set(reference.kinds)
    assert all("bf16 instructions" in words for words in reference.processors.values())
    for kind, expected in reference.kinds.items():
        assert set(expected) == set(NAMES), kind
        assert len(kind.split()) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_kind_names_the_kernels_level_type_and_lora_kernel(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level, named, kernel = kind_of_machine(dtype).split()
    assert level == compiler.current().name
    assert (named, kernel in ("native", "loop")) == (dtype, True)
    monkeypatch.setenv(compiler.VARIABLE, "generic")
    assert kind_of_machine(dtype).startswith("generic ")


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A guard for float32; its reference file."""
    file = tmp_path / "reference.json"
    Reference(MARGINS, {KIND: EXPECTED}, {}).write(file)
    monkeypatch.setattr(step_guard, "kind_of_machine", lambda dtype: f"avx2 {dtype} native")
    monkeypatch.setattr("sys.argv", ["step_guard", "--dtype", "float32", "--reference", str(file)])
    return file


def measure_own(series: list[dict[str, list[float]]]) -> type:
    class Measured:
        def __init__(self, dtype: str) -> None:
            self.left = list(series)

        def __call__(self, rounds: int) -> dict[str, float]:
            return ratios(self.left.pop(0))

    return Measured


def measure_against(series: list[float]) -> object:
    left = list(series)

    def measured(commit: str, dtype: str, rounds: int) -> dict[str, float]:
        assert commit == "before"
        return dict.fromkeys(("base", "identical", "distinct"), left.pop(0))

    return measured


SLOW, FINE = times(2.0, 1.5, 1.0, 0.66), times(1.5, 1.5, 1.0, 0.67)


def test_one_noisy_series_is_measured_again_and_passes(guard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_guard, "OwnRatios", measure_own([SLOW, FINE]))
    assert step_guard.main() == 0


def test_what_is_slow_three_times_fails(guard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_guard, "OwnRatios", measure_own([SLOW, SLOW, SLOW]))
    assert step_guard.main() == 1


def test_every_dtype_is_guarded_and_one_that_is_slow_fails_all(
    guard: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Reference(MARGINS, {KIND: EXPECTED, "avx2 bfloat16 native": dict.fromkeys(NAMES, 9.0)}, {}).write(guard)
    monkeypatch.setattr("sys.argv", ["step_guard", "--reference", str(guard)])
    monkeypatch.setattr(step_guard, "OwnRatios", measure_own([SLOW, SLOW, SLOW]))
    assert step_guard.main() == 1
    fine = "avx2 bfloat16 native is within the margins of the reference."
    slow = f"{KIND} is above the reference by more than the margin: {NAMES[0]}"
    assert capsys.readouterr().out.endswith(f"Step guard FAILED: a decode step on {slow}; {fine}\n")
    monkeypatch.setattr(step_guard, "OwnRatios", measure_own([FINE]))
    assert step_guard.main() == 0
    assert capsys.readouterr().out.endswith(
        f"Step guard PASSED: a decode step on {KIND} is within the margins of the reference; {fine}\n"
    )


@pytest.mark.parametrize(("series", "status"), [([1.02], 0), ([1.3, 1.01], 0), ([1.13, 1.2, 1.13], 1)])
def test_without_a_reference_steps_are_held_to_the_commit_before(
    guard: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    series: list[float],
    status: int,
) -> None:
    Reference(MARGINS, {"generic float32 native": EXPECTED}, {}).write(guard)
    monkeypatch.setattr(step_guard, "commit_before", lambda: "before")
    monkeypatch.setattr(step_guard, "ratios_against", measure_against(series))
    assert step_guard.main() == status
    assert "commit before" in capsys.readouterr().out.splitlines()[-1]


def test_a_commit_that_is_asked_for_counts_beside_a_reference_too(guard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_guard, "ratios_against", measure_against([1.5, 1.5, 1.5]))
    monkeypatch.setattr("sys.argv", ["step_guard", "--dtype", "float32", "--against", "before"])
    assert step_guard.main() == 1


@pytest.mark.parametrize(("own", "status"), [([FINE], 0), ([SLOW, SLOW, SLOW], 1)])
def test_without_reference_and_git_the_loosest_reference_counts(
    guard: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own: list[dict[str, list[float]]],
    status: int,
) -> None:
    def fail() -> str:
        raise NoComparisonError("git is not on this machine")

    tight = dict.fromkeys(NAMES, 1.0)
    Reference(MARGINS, {"generic float32 native": EXPECTED, "amx float32 native": tight}, {}).write(guard)
    monkeypatch.setattr(step_guard, "commit_before", fail)
    monkeypatch.setattr(step_guard, "OwnRatios", measure_own(own))
    assert step_guard.main() == status
    assert "git is not on this machine" in capsys.readouterr().out


def test_update_notes_the_ratios_of_this_kind_and_keeps_the_others(
    guard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Reference(MARGINS, {"generic bfloat16 loop": EXPECTED}, {}).write(guard)
    monkeypatch.setattr(step_guard, "OwnRatios", measure_own([FINE]))
    monkeypatch.setattr("sys.argv", ["step_guard", "--dtype", "float32", "--update", "--reference", str(guard)])
    assert step_guard.main() == 0
    kinds = Reference.read(guard).kinds
    assert set(kinds) == {"generic bfloat16 loop", KIND}
    assert Reference.read(guard).processors == {KIND: processor_words(machine())}
    assert kinds[KIND]["distinct / base"] == 1.5


FAKE = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, os.environ["PYTHONPATH"])
from lora_serve.cost import SECONDS
print(Path.cwd(), flush=True)
for _ in sys.stdin:
    print(json.dumps({"base": SECONDS}), flush=True)
"""


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository of two commits, in which a step takes 2 seconds and then 3, and a script that says so."""
    root = tmp_path / "checkout"
    for folder in against_commit.MEASURED:
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").touch()
    git(root, "init", "--quiet")
    for seconds in (2, 3):
        (root / "lora_serve" / "cost.py").write_text(f"SECONDS = {seconds}")
        git(root, "add", ".")
        git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", f"{seconds}")
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(against_commit, "ROOT", root)
    monkeypatch.setattr(against_commit, "SCRIPT", script)
    return root


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_steps_are_measured_by_each_commits_own_code(checkout: Path) -> None:
    assert commit_before() == git(checkout, "rev-parse", "HEAD^")
    assert ratios_against("HEAD^", "float32", 3) == {"base": 1.5}
    assert ratios_against("HEAD", "float32", 3) == {"base": 1.0}


def test_an_uncommitted_change_is_compared_with_the_commit_it_stands_on(checkout: Path) -> None:
    (checkout / "lora_serve" / "cost.py").write_text("SECONDS = 6")
    assert commit_before() == git(checkout, "rev-parse", "HEAD")
    assert ratios_against(commit_before(), "float32", 3) == {"base": 2.0}


def test_nothing_to_compare_with_is_said(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoComparisonError, match="git archive"):
        ratios_against("nobody", "float32", 3)
    (checkout / "lora_serve" / "cost.py").write_text("raise ValueError('no model')")
    with pytest.raises(NoComparisonError, match="no model"):
        ratios_against("HEAD", "float32", 3)
    monkeypatch.setattr(against_commit, "ROOT", tmp_path)
    with pytest.raises(NoComparisonError, match="not a git repository"):
        commit_before()
