"""How even a stream is: inter-token p99 over p50, out of reports of `lora-serve bench` or of samples.

    python -m benchmarks.evenness report.json [report.json ...]

A report has `itl_ms` with p50 and p99, in itself or in each of its `runs` or `medians`. Prints one line per run and
ends with 1 if one is above `--limit`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import percentiles
from benchmarks.workload import Sample


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--limit", type=float, default=2.0)
    options = parser.parse_args()
    found = {f"{file.name} {name}": tail_ratio(itl) for file in options.reports for name, itl in itl_of(_read(file))}
    for name, ratio in found.items():
        print(f"{ratio:6.2f}  {name}{'' if ratio <= options.limit else '  ABOVE'}")
    return int(any(ratio > options.limit for ratio in found.values()))


def tail_ratio(itl_ms: Mapping[str, float]) -> float:
    """p99 over p50; infinite where nothing was measured, so that an empty report never passes."""
    return itl_ms["p99"] / itl_ms["p50"] if itl_ms["p50"] > 0 else float("inf")


def tail_ratio_of(samples: Sequence[Sample]) -> float:
    """p99 over p50 of all gaps of all streams together."""
    return tail_ratio(percentiles([gap for sample in samples for gap in sample.gaps]))


def itl_of(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """(name of the run, its itl_ms)."""
    if "itl_ms" in report:
        yield _name(report), report["itl_ms"]
        return
    for run in report.get("medians") or report.get("runs") or []:
        yield _name(run), run["itl_ms"]


def _name(run: Mapping[str, Any]) -> str:
    return " ".join(str(run[field]) for field in ("engine", "popularity", "concurrency") if field in run)


def _read(file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(file.read_text())
    return report


if __name__ == "__main__":
    sys.exit(main())
