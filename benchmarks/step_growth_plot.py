"""docs/explanation/performance-growth-*.png: one small picture per way in which the cost of a step grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLES = {
    "rows": ("rows in the step", "ms per step"),
    "context": ("keys that each of 16 rows attends to", "ms per step"),
    "adapters": ("different adapters in 16 rows", "ms per step"),
    "rank": ("rank of 16 different adapters", "ms per step"),
    "chunk": ("tokens of a prompt in one step", "ms per step"),
    "registered": ("adapters registered", "microseconds, without the model"),
}
SHOWN_REGISTERED = ("resolve a name", "step, all on the host", "step, a fifth on the host")
COLOURS = {"base": "tab:gray", "one adapter": "tab:blue", "16 adapters": "tab:orange", "16 rows": "tab:orange"}


def draw(report: dict[str, Any], file: Path) -> None:
    """Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.4))
    for axis, (name, panel) in zip(axes.flat, report["panels"].items(), strict=False):
        _draw_panel(axis, name, panel)
    for axis in axes.flat[len(report["panels"]) :]:
        axis.set_visible(False)
    threads = f"{report['threads']} thread{'s' if report['threads'] > 1 else ''}" if "threads" in report else ""
    clock = "processor time" if report.get("clock") == "processor" else ""
    words = [report["shape"], report.get("dtype", ""), report["machine"]["cpu"], threads, clock]
    figure.suptitle(", ".join(filter(None, words)), fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def _draw_panel(axis: Any, name: str, panel: dict[str, Any]) -> None:
    title, unit = TITLES[name]
    for label, values in panel["series"].items():
        if name == "registered" and label not in SHOWN_REGISTERED:
            continue
        axis.plot(panel["x"], values, marker="o", markersize=4, label=label, color=COLOURS.get(label))
    axis.set_xlabel(title, fontsize=9)
    axis.set_ylabel(unit, fontsize=9)
    if name == "registered":
        axis.set_xscale("log")
        axis.set_yscale("log")
    else:  # linear, so that a straight line is a cost in proportion
        shown = [x for x in panel["x"] if x >= max(panel["x"]) / 8 or x == panel["x"][0]]
        axis.set_xticks(shown, [str(x) for x in shown], fontsize=8)
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if len(axis.lines) > 1:
        axis.legend(fontsize=8)
