"""The figures that were asked for, and what the results say of each."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.performance_tables import made, numbers, short, table

Report = dict[str, Any]
SIDE_BY_SIDE, STEP, SPECULATION, START = "side-by-side*.json", "step-[!g]*.json", "speculation*.json", "start*.json"


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure, its bound, and how a report of one pattern of names tells it; None: this report does not."""

    words: str
    bound: float
    is_least: bool
    pattern: str
    value: Callable[[Report], float | None]
    unit: str = ""

    def asked(self) -> str:
        return f"{'at least' if self.is_least else 'at most'} {self.bound:g}{self.unit}"

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_least else value <= self.bound


def aims_table(reports: Mapping[str, Report]) -> str:
    """Every aim with each file that tells it, or the words that none does."""
    return table(["asked", "bound", "measured", "", "processor"], [row for aim in AIMS for row in _rows(aim, reports)])


def _rows(aim: Aim, reports: Mapping[str, Report]) -> Iterator[list[str]]:
    files = sorted(fnmatch.filter(reports, aim.pattern))
    found = [(reports[name], value) for name in files if (value := aim.value(reports[name])) is not None]
    for report, value in found:
        verdict = "met" if aim.is_met(value) else "**missed**"
        where = f"{short(report)}; {made(report)}"
        yield [aim.words, aim.asked(), f"{value:.2f}{aim.unit}", verdict, where]
    if not found:
        yield [aim.words, aim.asked(), "", "not measured", ""]


def _has_bfloat16(report: Report) -> bool:
    return bool(report["machine"]["bf16_instructions"])


def _beside(popularity: str, ratio: str) -> Callable[[Report], float | None]:
    """A ratio of a side by side, on a processor with bf16 instructions."""
    return lambda report: report["ratios"].get(popularity, {}).get(ratio) if _has_bfloat16(report) else None


def _over_floor(dtype: str, *cases: str) -> Callable[[Report], float | None]:
    """The largest of the cases, for one type of numbers."""

    def value(report: Report) -> float | None:
        if numbers(report) != dtype:
            return None
        return max(float(report["cases"][case]["step_over_floor"]) for case in cases)

    return value


def _guessed(case: str, rows: int) -> Callable[[Report], float | None]:
    def value(report: Report) -> float | None:
        cells = [cell for cell in report["cells"] if (cell["case"], cell["rows"]) == (case, rows)]
        return float(cells[0]["ratio"]) if cells else None

    return value


AIMS = (
    Aim("base only, times vLLM's CPU build in bfloat16 without LoRA", 1.2, True, SIDE_BY_SIDE,
        _beside("base", "times vllm-lora-off-bfloat16")),
    Aim("16 adapters in the batch, times the best peer", 4.5, True, SIDE_BY_SIDE,
        _beside("uniform", "times the best peer")),
    Aim("16 adapters in the batch / base only", 0.85, True, SIDE_BY_SIDE,
        _beside("uniform", "share of base-only kept")),
    Aim("one adapter for all / base only", 0.95, True, SIDE_BY_SIDE,
        _beside("identical", "share of base-only kept")),
    Aim("step / floor, bfloat16, 16 rows without and with 16 adapters", 1.4, False, STEP,
        _over_floor("bfloat16", "16 rows, base", "16 rows, distinct")),
    Aim("step / floor, float32, 16 rows with 16 adapters", 1.35, False, STEP,
        _over_floor("float32", "16 rows, distinct")),
    Aim("guessed tokens: extraction at 1 row, `auto` over `off`", 1.5, True, SPECULATION,
        _guessed("harbor/extract", 1)),
    Aim("guessed tokens: random text at 16 rows, `auto` over `off`", 0.97, True, SPECULATION,
        _guessed("random", 16)),
    Aim("/ready on a known store, 135M, 32 adapters", 5, False, START,
        lambda report: float(report["again_ready_s"]), " s"),
    Aim("peak memory, 135M, 32 adapters", 1.5, False, START,
        lambda report: float(report["peak_rss"]) / 1e9, " GB"),
)  # fmt: skip
