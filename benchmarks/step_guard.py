"""Fails when a decode step costs more than it did: than the committed reference says, else than the commit before.

    python -m benchmarks.step_guard [--dtype float32 bfloat16] [--against COMMIT] [--update] [--rounds 60]

Measured are 16 decode rows on a Llama shape of six layers, made in memory, in each dtype, by the processor time of one
thread, which does not count the time that others run; cases alternate and the median of the rounds counts.

With a reference for this kind of machine (benchmarks/step_guard.json: kernels' level, type, LoRA kernel) three ratios
are held to it: 16 adapters / base, one adapter for all / base, and the base's step / its own products
(benchmarks/step_floor.py). Without one, the seconds of the three steps are held to those of the commit before, measured
beside it in a process of its own (benchmarks/against_commit.py): HEAD if something is changed, else its parent;
`--against` asks for that comparison with any commit. Where there is no git either, the ratios are held to the loosest
reference of the dtype. So it can fail everywhere.

What is above its limit is measured again, at most twice, and only what was above each time fails. What gets better is
asked to be noted with `--update`. The last line says what was held to what, and whether it passed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.against_commit import NoComparisonError, commit_before, ratios_against
from benchmarks.alternating import median_ratio, time_alternating
from benchmarks.guarded_model import GuardedModel
from benchmarks.report import kernel_level, machine
from benchmarks.step_floor import gemms_of
from lora_serve.commands.bench.report import processor_words
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots

REFERENCE = Path(__file__).with_name("step_guard.json")
DTYPES = ("float32", "bfloat16")
MAX_TRIES = 3
SLOWER_MARGIN = 0.12  # by which part a step may take longer than at the commit before
Ratios = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reference:
    """What is committed."""

    margins: Ratios  # ratio's name -> by which part it may be above its reference
    kinds: Mapping[str, Ratios]  # kind of machine -> ratio's name -> ratio
    processors: Mapping[str, str]  # kind of machine -> the one that was measured, in words

    @staticmethod
    def read(file: Path) -> Reference:
        return Reference(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    def noting(self, kind: str, found: Ratios) -> Reference:
        """This with the ratios of the machine at hand."""
        words = processor_words(machine())
        return Reference(self.margins, {**self.kinds, kind: found}, {**self.processors, kind: words})

    def loosest(self, dtype: str) -> dict[str, float]:
        """The highest that each ratio is on any kind of machine; of all dtypes where this one has no reference."""
        kinds = [ratios for kind, ratios in self.kinds.items() if kind.split()[1] == dtype] or [*self.kinds.values()]
        return {name: max(ratios[name] for ratios in kinds) for name in self.margins}


@dataclass(frozen=True, slots=True)
class Limits:
    """What ratios are held to."""

    kind: str  # of machine
    source: str  # e.g. "the reference"
    expected: Ratios
    margins: Ratios

    def exceeded(self, found: Ratios) -> list[str]:
        """Names of the ratios that are too high."""
        return [name for name, ratio in found.items() if ratio > self.expected[name] * (1 + self.margins[name])]

    def is_better(self, found: Ratios) -> bool:
        """True if one is lower by its margin and none higher by half of it: a slower base lowers ratios."""
        halves = {name: margin / 2 for name, margin in self.margins.items()}
        is_higher = Limits(self.kind, self.source, self.expected, halves).exceeded(found)
        return not is_higher and bool(Limits(self.kind, self.source, found, self.margins).exceeded(self.expected))

    def judge(self, found: Ratios) -> Verdict:
        """Say how the ratios stand."""
        for name, ratio in found.items():
            change = ratio / self.expected[name] - 1
            print(
                f"{name:20} {ratio:6.3f}   {self.source} {self.expected[name]:6.3f}   "
                f"{change:+.1%} of {self.margins[name]:+.0%}"
            )
        failed = self.exceeded(found)
        if failed:
            print("If that is meant, scripts/step_guard --update notes today's ratios, and the commit says why.")
        elif self.is_better(found):
            print("Better by more than the margin: scripts/step_guard --update would hold it.")
        stands = f"above {self.source} by more than the margin: {', '.join(failed)}"
        return Verdict(bool(failed), f"{self.kind} is {stands if failed else f'within the margins of {self.source}'}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of one dtype's comparison."""

    has_failed: bool
    words: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--update", action="store_true", help="note the ratios as this kind of machine's reference")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, whatever the reference says")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.update:
        for dtype in options.dtype:
            update(dtype, options)
        return 0
    verdicts = [guard(dtype, options) for dtype in options.dtype]
    has_failed = any(verdict.has_failed for verdict in verdicts)
    words = "; ".join(verdict.words for verdict in verdicts)
    print(f"Step guard {'FAILED' if has_failed else 'PASSED'}: a decode step on {words}.")
    return int(has_failed)


def update(dtype: str, options: argparse.Namespace) -> None:
    """Measure one dtype and note it."""
    kind, found = kind_of_machine(dtype), OwnRatios(dtype)(options.rounds)
    Reference.read(options.reference).noting(kind, found).write(options.reference)
    print(f"step guard on {kind}, noted: {found}")


def guard(dtype: str, options: argparse.Namespace) -> Verdict:
    """Measure and judge one dtype."""
    kind, reference = kind_of_machine(dtype), Reference.read(options.reference)
    expected = reference.kinds.get(kind)
    if expected is None or options.against:
        try:
            return guard_against(options.against or commit_before(), kind, dtype, options.rounds)
        except NoComparisonError as error:
            print(f"step guard on {kind}: no comparison with a commit ({error})")
    source = "the reference" if expected else "the loosest reference of other machines"
    limits = Limits(kind, source, expected or reference.loosest(dtype), reference.margins)
    return hold(OwnRatios(dtype), options.rounds, limits)


def guard_against(commit: str, kind: str, dtype: str, rounds: int) -> Verdict:
    """Compare with a commit. Raises NoComparisonError."""

    def measure(rounds: int) -> dict[str, float]:
        return {f"{name} / before": ratio for name, ratio in ratios_against(commit, dtype, rounds).items()}

    names = [f"{name} / before" for name in ("base", "identical", "distinct")]
    limits = Limits(kind, f"commit {commit[:12]}", dict.fromkeys(names, 1.0), dict.fromkeys(names, SLOWER_MARGIN))
    return hold(measure, rounds, limits)


def hold(measure: Callable[[int], Ratios], rounds: int, limits: Limits) -> Verdict:
    """Measure until the limits are kept, at most three times."""
    tries = [measure(rounds)]
    while len(tries) < MAX_TRIES and limits.exceeded(best(tries)):
        tries.append(measure(rounds))
    print(f"step guard on {limits.kind}, beside {limits.source}, {len(tries)} x {rounds} rounds")
    return limits.judge(best(tries))


class OwnRatios:
    """Ratios of this process's own steps."""

    def __init__(self, dtype: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            guarded = GuardedModel(Path(scratch), dtype)
        self._cases = {**guarded.cases(), "gemms": gemms_of(guarded.model, guarded.batches["base"])}

    def __call__(self, rounds: int) -> dict[str, float]:
        return ratios(time_alternating(self._cases, rounds, time.process_time))


def kind_of_machine(dtype: str) -> str:
    """E.g. "avx2 float32 native": what the ratios depend on, besides the code."""
    kernel = create_kernel("auto", LoraSlots({}, 1, torch.device("cpu")))
    return f"{kernel_level()} {dtype} {type(kernel).__module__.rpartition('.')[2]}"


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The three ratios of one series of rounds."""
    return {
        "distinct / base": round(median_ratio(times["distinct"], times["base"]), 3),
        "identical / base": round(median_ratio(times["identical"], times["base"]), 3),
        "step / its products": round(median_ratio(times["base"], times["gemms"]), 3),
    }


def best(tries: Sequence[Ratios]) -> dict[str, float]:
    """The least that each ratio was: noise only adds."""
    return {name: min(one[name] for one in tries) for name in tries[0]}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
