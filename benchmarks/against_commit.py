"""Decode steps of this checkout beside those of a commit: two processes on one machine that take turns.

Each commit is measured by its own code (`benchmarks/guarded_model.py` on its `lora_serve`), by the processor time of
one thread, round by round in turn; a ratio is the median over the rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.alternating import WARM_ROUNDS, median_ratio

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("lora_serve", "benchmarks")  # the folders of a commit that a measurement runs
SCRIPT = Path(__file__).with_name("guarded_model.py")
Times = dict[str, list[float]]


class NoComparisonError(Exception):
    """There is nothing to compare with; the message says why."""


def commit_before() -> str:
    """HEAD where the measured folders differ from it, else its first parent. Raises NoComparisonError."""
    is_changed = bool(_git("status", "--porcelain", "--", *MEASURED))
    return _git("rev-parse", "--verify", "HEAD" if is_changed else "HEAD^1").decode().strip()


def ratios_against(commit: str, dtype: str, rounds: int) -> dict[str, float]:
    """Case -> its seconds here by those at `commit`. Raises NoComparisonError."""
    with unpacked(commit) as folder, _measuring(ROOT, dtype) as here, _measuring(folder, dtype) as there:
        times = take_turns([here, there], rounds)
    ours, theirs = times
    return {name: round(median_ratio(ours[name], theirs[name]), 3) for name in ours}


@contextlib.contextmanager
def unpacked(commit: str) -> Iterator[Path]:
    """The commit's measured folders in a temporary one. Raises NoComparisonError."""
    with tempfile.TemporaryDirectory(prefix="step_guard_") as folder:
        archive = _git("archive", commit, "--", *MEASURED)
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


class MeasuringProcess:
    """One that runs `guarded_model.py` on the code in `folder`."""

    def __init__(self, folder: Path, dtype: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self._folder = folder.resolve()
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed by stop
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), dtype], env=environment, cwd=folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Return when its model is loaded. Raises NoComparisonError with its last words."""
        assert self._process.stdout is not None
        runs = self._process.stdout.readline().strip()
        if not runs:
            raise NoComparisonError(f"its measurement ended: {self._last_words()}")
        assert Path(runs) == self._folder, f"{runs} was measured for {self._folder}"

    def round(self) -> dict[str, float]:
        """Seconds of each case, run once. Raises NoComparisonError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            return dict(json.loads(self._process.stdout.readline()))
        except (OSError, ValueError) as error:
            raise NoComparisonError(f"its measurement ended: {self._last_words()}") from error

    def stop(self) -> None:
        with self._process, self._words:
            self._process.kill()

    def _last_words(self) -> str:
        self._words.seek(0)
        return (self._words.read().strip().splitlines() or ["without a word"])[-1]


def take_turns(processes: Sequence[MeasuringProcess], rounds: int) -> list[Times]:
    """Of each process, case -> seconds by round; the first rounds are not counted."""
    found: list[Times] = [{} for _ in processes]
    for index in range(rounds + WARM_ROUNDS):
        for process, times in zip(processes, found, strict=True):
            seconds = process.round()
            if index >= WARM_ROUNDS:
                for name, value in seconds.items():
                    times.setdefault(name, []).append(value)
    return found


@contextlib.contextmanager
def _measuring(folder: Path, dtype: str) -> Iterator[MeasuringProcess]:
    process = MeasuringProcess(folder, dtype)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise NoComparisonError("git is not on this machine") from error
    if done.returncode != 0:
        raise NoComparisonError(f"git {' '.join(arguments[:2])}: {done.stderr.decode().strip()}")
    return done.stdout
