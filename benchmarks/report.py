"""What every report holds: the machine and its versions, the day and the commit, and percentiles."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lora_serve.commands.bench.report import machine as bench_machine
from lora_serve.commands.bench.report import spread_ms, versions
from lora_serve.model.native import compiler

RESULTS = Path(__file__).with_name("results")
SERVER = RESULTS.parents[1] / "lora_serve"
PACKAGES = ("torch", "transformers", "peft", "aiohttp")


class Page(Protocol):
    """The module of a report's page: its table, the bounds that it missed, and the place where it stands."""

    def table(self, report: dict[str, Any], /) -> str: ...
    def failures(self, report: dict[str, Any], /) -> list[str]: ...
    def write_page(self, report: dict[str, Any], /) -> None: ...


def judged(report: dict[str, Any], page: Page, *, write: bool) -> int:
    """The exit code: 1 if a bound was missed. Prints the table and each miss; `write`: the page is written, too."""
    if write:
        page.write_page(report)
    print(page.table(report))
    found = page.failures(report)
    for line in found:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if found else 0


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Writes a text between two marks of a page. Raises ValueError if the page lacks one of them."""
    head, found, rest = page.read_text().partition(begin)
    _, also, tail = rest.partition(end)
    if not (found and also):
        raise ValueError(f"{page} has not both of {begin} and {end}")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def made_on(machine: dict[str, Any]) -> str:
    """One sentence: on what, when and of which commit figures were made."""
    commit = f", commit {machine['commit']}" if machine.get("commit") else ""
    numbers = f" ({machine['cpu_numbers']})" if machine.get("cpu_numbers") else ""
    return f"On {machine['cores']} cores of {machine['cpu']}{numbers}, {machine['date']}{commit}."


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Seconds in, ms out: p50, p90, p99; zeros of nothing."""
    return {share: round(value, 2) for share, value in spread_ms(seconds).items() if share.startswith("p")}


def machine() -> dict[str, Any]:
    """What ran this: day, commit, processor, the level of the native kernels that it has, memory, versions."""
    made = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit()}
    return {**made, **bench_machine(), "kernels": kernel_level(), "versions": versions(PACKAGES)}


def commit() -> str:
    """The commit that is measured, with a + if the server's code was changed since; empty: there is no git."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", f"{SERVER}"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + "+" * bool(changed)


def kernel_level() -> str:
    """The best level of native kernels for this processor, or the lower one that is asked for: "avx2", "amx", ..."""
    return compiler.current().name


def result_file(*words: str) -> Path:
    """Where figures of this kind of processor are kept: results/WORDS.json, joined by hyphens."""
    return RESULTS / f"{'-'.join(words)}.json"
