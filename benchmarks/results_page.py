"""Rewrites benchmarks/results/README.md: which file is from which processor, when it was made, and by which command.

    python -m benchmarks.results_page

A file's own words count where it has them (`machine` with the day and the commit that was measured, `command`); else
the day of its last commit, today for one that is not committed as it is, and the command that makes a file of this
name.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.performance_tables import processor, table
from benchmarks.report import RESULTS

PAGE = RESULTS / "README.md"
PICTURES = (".png",)
COUNTS = {  # files without speeds: the same on every processor
    "clients.json": "scripts/clients",
    "house-before.json": "python scripts/meters.py --tests JUNIT_XML --write benchmarks/results/house-before.json",
    "house-after.json": "python scripts/meters.py --tests JUNIT_XML --write benchmarks/results/house-after.json",
    "schema-suite.json": "python -m benchmarks.schema_suite .../json/tests --out benchmarks/results/schema-suite.json",
    "simulation.json": "python -m benchmarks.simulation",
}
COMMANDS = {  # of files that do not tell theirs; without options where it was not noted
    "adapter-kinds": "python -m benchmarks.adapter_kinds",
    "batching": "python -m benchmarks.batching",
    "cold-first-token": "python -m benchmarks.cold_first_token",
    "cold-loads": "python -m benchmarks.cold_loads",
    "fairness": "python -m benchmarks.fairness",
    "fuzz": "scripts/fuzz",
    "host-step": "python -m benchmarks.host_step",
    "first-request": "python -m benchmarks.first_request",
    "latency-target": "python -m benchmarks.latency_target",
    "lora-kernels": "python -m benchmarks.lora_kernels",
    "many-adapters": "python -m benchmarks.many_adapters",
    "memory": "python -m benchmarks.memory",
    "overload": "python -m benchmarks.overload",
    "prefix-cache": "python -m benchmarks.prefix_cache",
    "reliability": "python -m benchmarks.reliability",
    "speculation": "python -m benchmarks.speculation --dtype float32",
    "simulator-check": "python -m benchmarks.simulator_check",
    "structured-output": "python -m benchmarks.structured_output",
}
HEAD = """# Results

Every figure is of the processor beside it: compare ratios of one file, never times of two. Virtual machines hide a
processor's name; its family, model, instructions and the level of the native kernels tell the kind. Kernels `avx2` are
those without AVX-512, `amx` those with AMX and AVX512-BF16 (`lora_serve/model/native/compiler.py`). Files from before
kernels had levels name none; a machine without bf16 instructions ran what is `avx2` now. Pictures are of the file of
their name. *Made* is the day, with the commit that was measured where the file notes it (a + behind it: with changes).

This page is written by `python -m benchmarks.results_page`.

"""


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    rows = [[f"`{file.name}`", *_row(file)] for file in sorted(RESULTS.glob("*.json"))]
    return HEAD + table(["file", "processor", "made", "command"], rows)


def processors() -> Iterator[tuple[str, str | None]]:
    """Every JSON file's name, with its `machine.gpu` or `machine.cpu`; None: it names none."""
    for file in sorted(RESULTS.glob("*.json")):
        found = _machine(json.loads(file.read_text()))
        yield file.name, found.get("gpu") or found.get("cpu")


def _row(file: Path) -> list[str]:
    """Its processor or GPU, its day, with the commit where it was noted, and its command."""
    document = json.loads(file.read_text())
    if file.name in COUNTS:
        return ["any: checks, counts or made-up time", _day(file), f"`{COUNTS[file.name]}`"]
    found = _machine(document)
    kernels = f", kernels `{found['kernels']}`" if "kernels" in found else ""
    commit = f", commit {found['commit']}" if found.get("commit") else ""
    made = f"{document.get('date') or found.get('date') or _day(file)}{commit}"
    return [f"{found.get('gpu') or processor(document)}{kernels}", made, f"`{_command(file, document)}`"]


def _machine(document: Any) -> dict[str, Any]:
    return dict(document.get("machine") or {}) if isinstance(document, dict) else {}


def _command(file: Path, document: dict[str, Any]) -> str:
    names = (name for name in sorted(COMMANDS, reverse=True) if file.stem.startswith(name))
    return str(document.get("command") or COMMANDS[next(names)])


def _day(file: Path) -> str:
    """The day of the last commit of its content, or today if it has changed since."""
    changed = _git("status", "--porcelain", "--", str(file))
    return (
        _git("log", "-1", "--follow", "--diff-filter=AM", "--format=%as", "--", str(file)) if not changed else _today()
    )


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=RESULTS, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
