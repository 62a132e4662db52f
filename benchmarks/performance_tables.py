"""The tables of docs/explanation/performance.md, each made of one file of benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.step_seams import PARTS
from lora_serve.commands.bench.report import processor_words

Report = dict[str, Any]
POPULARITIES = {"base": "base only", "identical": "one adapter for all", "uniform": "16 adapters in the batch"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def processor(report: Report) -> str:
    """The processor, in words."""
    return processor_words(report["machine"])


def beside(reports: Sequence[Report], popularities: Sequence[str]) -> str:
    """Engines of several side by sides, each under its processor: tokens/s, time to the first and between tokens."""
    rows = []
    for report in reports:
        cells = {(median["engine"], median["popularity"]): median for median in report["medians"]}
        measured = [one for one in report["engines"] if any((one["engine"], name) in cells for name in popularities)]
        for engine in measured:
            first = processor(report) if engine is measured[0] else ""
            found = [_throughput(cells.get((engine["engine"], name))) for name in popularities]
            load = f"{report['rounds']} x {report['load']['num_requests']}, {report['shape']}"
            memory = f"{engine['peak_rss'] / 2**30:.1f} GiB"
            rows.append([first, engine["engine"], load, *found, memory, f"{engine['start_s']:.0f} s"])
    titles = [POPULARITIES[name] for name in popularities]
    return table(["processor", "engine", "rounds x requests", *titles, "peak memory", "start"], rows)


def _throughput(median: Report | None) -> str:
    if median is None:
        return ""
    first, between = median["ttft_ms"]["p50"] / 1000, median["itl_ms"]["p50"]
    return f"{median['output_tokens_per_s']:.0f} tokens/s, {first:.1f} s, {between:.0f} ms"


def place(report: Report) -> str:
    """The processor, its kernels and the type of numbers."""
    words = [processor(report)]
    words += [f"kernels `{report['machine']['kernels']}`"] if "kernels" in report["machine"] else []
    words += [report["dtype"]] if "dtype" in report else []
    return ", ".join(words)


def caption(report: Report) -> str:
    """Where and how it was measured."""
    threads = report.get("threads")
    words = [place(report)]
    words += [f"{threads} thread{'s' if threads > 1 else ''} of torch's"] if threads else []
    words += ["processor time"] if report.get("clock") == "processor" else []
    words += [f"torch {report['machine']['versions']['torch']}"]
    command = f"; `{report['command']}`" if "command" in report else ""
    return ", ".join(words) + command


def roofline(report: Report) -> str:
    """What each step must read and compute, its floor and its time."""
    rows = []
    for name, case in report["cases"].items():
        gemm = case["gemm_ms"]
        base = report["base_weights"] * report["weight_bytes"]
        body = report["base_weights"] - report["head_weights"]
        operations = 2 * (body * case["tokens"] + report["head_weights"] * case["rows"])
        products = [f"{ms:.1f}" for ms in case.get("gemms_ms", {"": gemm}).values()]
        rows.append([
            name, _mb(base), _mb(case["floor_bytes"]), f"{operations / 1e9:.2f}",
            f"{operations / gemm / 1e6:.0f}", f"{base / gemm / 1e6:.1f}", " / ".join(products),
            f"{case['floor_ms']:.1f}", f"{case['ms']:.1f}", f"{case['step_over_floor']:.2f}",
        ])  # fmt: skip
    whose = "products, own / oneDNN, ms" if "gemms_ms" in case else "products, ms"
    head = ["step", "weights, MB", "adapters + KV, MB", "GFLOP of the base", "products, GFLOP/s", "products, GB/s"]
    head += [whose, "floor, ms", "step, ms", "step / floor"]
    bandwidth = (
        f"Reading at {report['read_bytes_per_second'] / 1e9:.1f} GB/s (a large tensor summed in the same run).\n"
    )
    return f"{bandwidth}\n{table(head, rows)}"


def ratios(report: Report) -> str:
    return table(["steps", "ratio of times"], [[name, f"{ratio:.2f}"] for name, ratio in report["ratios"].items()])


def parts(report: Report) -> str:
    """Milliseconds of each part, and its share of the step."""
    rows = []
    for name, case in report["cases"].items():
        found = case["parts_ms"]
        cells = [f"{found[part]:.1f} ({found[part] / found['total']:.0%})" for part in PARTS]
        rows.append([name, *cells, f"{found['total']:.1f}"])
    return table(["step, ms", *PARTS, "total"], rows)


def operators(report: Report) -> str:
    rows = [[f"`{row['name']}`", str(row["calls"]), f"{row['self_ms']:.2f}"] for row in report["operators"]]
    return table(["operator", "calls per step", "ms inside it"], rows)


def growth_file(report: Report) -> str:
    """The picture's name: of its kind of processor and its type."""
    return f"performance-growth-{report['machine'].get('kernels', 'avx2')}-{report['dtype']}.png"


def growth_picture(report: Report) -> str:
    return f"![How a step's cost grows]({growth_file(report)})\n"


def growth(name: str, unit: str, report: Report) -> str:
    """One panel: a column per x; where there is a base, what the others are of it."""
    panel = report["panels"][name]
    series = dict(panel["series"])
    rows = [[label, *map(_number, values)] for label, values in series.items()]
    base = series.get("base")
    for label, values in series.items():
        if base and label != "base":
            rows.append([f"{label} / base", *(f"{a / b:.2f}" for a, b in zip(values, base, strict=True))])
    return table([unit, *(f"{x:,}".replace(",", " ") for x in panel["x"])], rows)


def registered(report: Report) -> str:
    return growth("registered", "microseconds, by adapters registered", report)


def start(report: Report) -> str:
    rows = [
        ["a new store, adapters checked, tried and copied first", f"{report['first_ready_s']:.1f} s"],
        ["the store of a server before", f"{report['again_ready_s']:.1f} s"],
        ["memory at most, after requests to all adapters", f"{report['peak_rss'] / 1e9:.2f} GB"],
    ]
    words = f"{report['shape']}, {report['adapters']} adapters, {report['kv_bytes'] / 1e6:.0f} MB of KV cache.\n"
    return f"{words}\n{table(['to /ready, and memory', 'median'], rows)}"


def many(report: Report) -> str:
    rows = []
    for run in report["runs"]:
        few, all_of_them = (sorted(run[kind]["output_tokens_per_s"]) for kind in ("few", "many"))
        rows.append([
            f"{run['num_adapters']:,}".replace(",", " "), str(run["slots"]), run["shape"], str(len(few)),
            f"{few[len(few) // 2]:.0f}", f"{all_of_them[len(few) // 2]:.0f}", f"{run['kept']:.2f}",
        ])  # fmt: skip
    head = ["registered", "slots", "shape", "rounds", "tokens/s with as many adapters as slots", "with all", "kept"]
    return table(head, rows)


def _number(value: float) -> str:
    """Three digits or so: a table holds microseconds of four magnitudes."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"
