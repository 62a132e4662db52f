"""The picture of a side by side, from its JSON; without matplotlib there is none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {
    "lora_serve": "#d1495b",
    "vllm": "#30638e",
    "vllm-lora-off": "#8fb8de",
    "llama_cpp": "#3c896d",
    "peft": "#edae49",
    "transformers": "#8d7b9c",
}


def plot(report: Mapping[str, Any], file: Path) -> bool:
    """Throughput, waiting and memory of every measured engine; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, parts = pyplot.subplots(2, 2, figsize=(13, 8.5))
    medians, titles = report["medians"], _titles(report)
    _bars(parts[0][0], medians, titles, "output tokens/s", lambda median: median["output_tokens_per_s"], has_range=True)
    _bars(
        parts[0][1],
        medians,
        titles,
        "inter-token time, ms: p50 (bar), p99 (line)",
        lambda m: m["itl_ms"]["p50"],
        "itl_ms",
    )
    _bars(parts[1][0], medians, titles, "time to first token, s: p50 (bar), p99 (line)", _first_token, "ttft_ms")
    _memory(parts[1][1], report)
    figure.suptitle(_title(report), fontsize=11)
    handles, labels = parts[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return True


def _titles(report: Mapping[str, Any]) -> dict[str, str]:
    uniform, skewed = (report["adapters"][name] for name in ("uniform", "skewed"))
    return {
        "base": "base only",
        "identical": "one adapter\nfor all",
        "uniform": f"{uniform} adapters,\nevenly",
        "skewed": f"{skewed} adapters,\nZipf",
    }


def _first_token(median: Mapping[str, Any]) -> float:
    return float(median["ttft_ms"]["p50"]) / 1000


def _bars(
    part: Any, medians: Any, titles: dict[str, str], title: str, height: Any, tail: str = "", *, has_range: bool = False
) -> None:
    """One group for each popularity. A line up to the p99 of `tail`, or from the least to the most of the rounds."""
    popularities = list(dict.fromkeys(median["popularity"] for median in medians))
    families = list(dict.fromkeys(median["family"] for median in medians))
    width = 0.85 / max(1, len(families))
    for median in medians:
        place = families.index(median["family"]) - (len(families) - 1) / 2
        x, top = popularities.index(median["popularity"]) + place * width, height(median)
        label = median["engine"] if median["engine"] not in part.get_legend_handles_labels()[1] else None
        part.bar(x, top, 0.92 * width, color=COLOURS.get(median["family"], "grey"), label=label)
        if has_range:
            part.vlines(x, median["least"], median["most"], color="black", linewidth=1)
            part.annotate(f"{top:.0f}", (x, median["most"]), ha="center", va="bottom", fontsize=8)
        elif tail:
            part.vlines(x, top, median[tail]["p99"] / (1000 if tail == "ttft_ms" else 1), color="black", linewidth=1)
    part.set_xticks(range(len(popularities)), [titles[name] for name in popularities])
    part.set_title(title, fontsize=10)
    if not has_range:
        part.set_yscale("log")
        part.yaxis.set_major_formatter("{x:g}")
        part.yaxis.set_minor_formatter("{x:g}")
        part.tick_params(axis="y", which="minor", labelsize=7)
    part.grid(axis="y", alpha=0.3)
    part.spines[["top", "right"]].set_visible(False)


def _memory(part: Any, report: Mapping[str, Any]) -> None:
    """Peak memory as bars, with the seconds to readiness beside them."""
    measured = {median["engine"] for median in report["medians"]}
    engines = [engine for engine in report["engines"] if engine["engine"] in measured][::-1]
    for place, engine in enumerate(engines):
        size = engine["peak_rss"] / 2**30
        part.barh(place, size, 0.7, color=COLOURS.get(engine["family"], "grey"))
        part.annotate(f" {size:.1f} GiB, ready after {engine['start_s']:.0f} s", (size, place), va="center", fontsize=9)
    part.set_yticks(range(len(engines)), [engine["engine"] for engine in engines])
    part.set_title("peak memory, GiB, and start", fontsize=10)
    part.set_xlim(right=1.45 * max((engine["peak_rss"] / 2**30 for engine in engines), default=1.0) or 1.0)
    part.spines[["top", "right"]].set_visible(False)


def _title(report: Mapping[str, Any]) -> str:
    load, machine = report["load"], report["machine"]
    return (
        f"{report['shape']} shape, {load['num_requests']} requests, {load['concurrency']} at a time, prompts of "
        f"{load['min_prompt_tokens']}-{load['max_prompt_tokens']} tokens, {load['output_tokens']} new tokens; "
        f"{machine['cores']} cores, {machine['cpu']}; medians of {report['rounds']} rounds"
    )
