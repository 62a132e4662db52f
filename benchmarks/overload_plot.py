"""The picture of `overload.py`; matplotlib is needed for it and for nothing else.

python -m benchmarks.overload_plot benchmarks/results/overload.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], file: Path) -> None:
    """Goodput against offered load, and how long refusals take. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    factors = [row["factor"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    goodput = [row["goodput"] for row in rows]
    left.plot(factors, goodput, "o-", label="goodput")
    left.axhline(0.9 * max(goodput), linestyle="--", color="grey", label="90 % of the peak")
    left.set(xscale="log", xlabel="offered load / capacity", ylabel="tokens per second", ylim=(0, None))
    refused = [row for row in rows if row["refused"]]
    for percent in ("p50", "p99"):
        times = [row[f"refusal_ms_{percent}"] for row in refused]
        right.plot([row["factor"] for row in refused], times, "o-", label=f"refusal, {percent}")
    right.axhline(50, linestyle="--", color="grey", label="50 ms")
    right.set(xscale="log", xlabel="offered load / capacity", ylabel="milliseconds", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(factors, [f"{factor:g}" for factor in factors], minor=False)
        axes.minorticks_off()
        axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
