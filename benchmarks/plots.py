"""The pictures of `batching` and `latency_target`; without matplotlib there is none, only the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_batching(cells: list[dict[str, Any]], file: Path) -> None:
    """Output tokens a second against the p90 of the first token, one line per setting over the rates."""
    pyplot = _pyplot()
    if pyplot is None:
        return
    figure, parts = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    titles = {"batch_wait_ms": "wait window", "max_num_seqs": "rows at most, no window"}
    for part, (name, title) in zip(parts, titles.items(), strict=True):
        part.set(title=title, xlabel="p90 of time to first token, ms", ylabel="output tokens/s", xscale="log")
        for label, line in _lines(cells, name).items():
            part.plot([x for x, _ in line], [y for _, y in line], marker="o", label=label)
        part.legend()
        part.grid(alpha=0.3)
    _save(pyplot, figure, file)


def plot_targets(facts: dict[str, Any], runs: dict[str, Any], file: Path) -> None:
    """p95 of each phase beside its target."""
    pyplot = _pyplot()
    if pyplot is None:
        return
    figure, parts = pyplot.subplots(1, 2, figsize=(12, 5))
    kinds = {"ttft": "time to first token", "itl": "inter-token time"}
    for part, (kind, title) in zip(parts, kinds.items(), strict=True):
        part.set(title=f"p95 of {title}, ms", yscale="log")
        part.set_xticks(range(3), [f"{rate} requests/s" for rate in facts["requests_per_s"]])
        part.axhline(facts[f"{kind}_target_ms"], color="black", linestyle="--", label="target")
        for index, (name, run) in enumerate(runs.items()):
            heights = [phase[f"{kind}_p95_ms"] or 0.0 for phase in run["phases"]]
            part.bar([phase + 0.14 * (index - 2.5) for phase in range(3)], heights, 0.13, label=name)
        part.legend()
    _save(pyplot, figure, file)


def _lines(cells: list[dict[str, Any]], name: str) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        settings = cell["settings"]
        if name in settings:
            label = ", ".join(f"{key} {value:g}" for key, value in settings.items())
            lines.setdefault(label, []).append((cell["ttft_ms"]["p90"], cell["output_tokens_per_s"]))
    return lines


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    print(f"written: {file.name}")
