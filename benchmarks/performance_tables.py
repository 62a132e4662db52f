"""The tables of docs/explanation/performance.md, each made of one file of benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.step_seams import PARTS
from lora_serve.commands.bench.report import processor_words

Report = dict[str, Any]
OURS, ALONE = "lora_serve", "itself alone"
PEERS = {  # as a reader knows them
    "llama_cpp-f16": "llama.cpp (f16)",
    "llama_cpp-bf16": "llama.cpp (bf16)",
    "vllm-lora-off-float32": "vLLM without LoRA (float32)",
    "vllm-lora-off-bfloat16": "vLLM without LoRA (bfloat16)",
    "vllm-float32": "vLLM (float32)",
    "vllm-bfloat16": "vLLM (bfloat16)",
}
POPULARITIES = {"base": "base only", "identical": "one adapter for all", "uniform": "16 adapters in the batch"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def processor(report: Report) -> str:
    """The processor, in words."""
    return processor_words(report["machine"])


def short(report: Report) -> str:
    """The kind of processor in a few words, for tables that name several."""
    name = report["machine"]["cpu"].replace("(R)", "").removesuffix(" Processor")
    tiles = "with AMX" if report["machine"].get("kernels") == "amx" else ""
    bf16 = f"with{'' if report['machine']['bf16_instructions'] else 'out'} bf16 instructions"
    return f"{name}, {report['machine']['cores']} cores, {tiles or bf16}"


def beside(reports: Sequence[Report], popularities: Sequence[str]) -> str:
    """Side by sides, a row for each peer: tokens/s of this server, and how many times the peer's of the same run."""
    rows = [row for report in reports for row in _beside(report, popularities)]
    titles = [f"{POPULARITIES[name]}, tokens/s" for name in popularities]
    return table(["processor", "beside", "load", *titles], rows)


def _beside(report: Report, popularities: Sequence[str]) -> Iterator[list[str]]:
    where = f"{short(report)}; {numbers(report)}; {made(report)}"
    peers = [engine["engine"] for engine in report["engines"] if engine["engine"] != OURS]
    for number, peer in enumerate(peers or [ALONE]):
        cells = [_ratio(report, peer, name) for name in popularities]
        if any(cells):
            yield [where if number == 0 else "", PEERS.get(peer, peer), _load(report), *cells]


def _load(report: Report) -> str:
    return f"{report['shape']}, {report['rounds']} rounds of {report['load']['num_requests']}"


def _ratio(report: Report, peer: str, popularity: str) -> str:
    """Ours, which part it is of our own base-only figure, and how many times the peer's."""
    speeds = {(one["engine"], one["popularity"]): one["output_tokens_per_s"] for one in report["medians"]}
    ours, base, theirs = (speeds.get(key) for key in ((OURS, popularity), (OURS, "base"), (peer, popularity)))
    if ours is None or (theirs is None and peer != ALONE):
        return ""
    kept = f" ({ours / base:.2f} of base only)" if base and popularity != "base" else ""
    return f"{ours:.0f}{kept}" + (f", {ours / theirs:.2f} times its {theirs:.0f}" if theirs else "")


def latencies(reports: Sequence[Report]) -> str:
    """Every engine of the side by sides: times to the first and between tokens, memory and start."""
    rows = []
    for report in reports:
        for number, engine in enumerate(report["engines"]):
            found = [one for one in report["medians"] if one["engine"] == engine["engine"]]
            cells = {one["popularity"]: one for one in found}
            memory, start_s = f"{engine['peak_rss'] / 2**30:.1f} GiB", f"{engine['start_s']:.0f} s"
            times = [_times(cells.get(name)) for name in ("base", "uniform")]
            where = f"{short(report)}; {_load(report)}; {made(report)}" if number == 0 else ""
            name = PEERS.get(engine["engine"], engine["engine"])
            rows.append([where, f"{name}, {_version(engine)}", *times, memory, start_s])
    return table(["processor", "engine", "base only", "16 adapters in the batch", "peak memory", "start"], rows)


def _version(engine: Report) -> str:
    """The version of an engine, the first that its report names: the others are those of its libraries."""
    return next(iter(engine["versions"].values()), "")


def _times(median: Report | None) -> str:
    if median is None:
        return ""
    return f"{median['ttft_ms']['p50'] / 1000:.1f} s, {median['itl_ms']['p50']:.0f} ms"


def numbers(report: Report) -> str:
    """The type of numbers of this server; an older report does not tell: float32, as it had no bfloat16 kernels."""
    return str(report.get("dtype", "float32"))


def made(report: Report) -> str:
    """The day, and the commit where it was noted."""
    commit = report["machine"].get("commit")
    day = str(report.get("date") or report["machine"]["date"])
    return f"{day}, commit {commit}" if commit else day


def speculation(reports: Sequence[Report]) -> str:
    """Tokens per second with guesses over those without, by text and rows, all reports of one kind of processor."""
    cells = [cell for report in reports for cell in report["cells"]]
    counts = sorted({cell["rows"] for cell in cells})
    found = {(cell["case"], cell["rows"]): cell for cell in cells}
    rows = []
    for case in dict.fromkeys(cell["case"] for cell in cells):
        ratios = [found.get((case, count)) for count in counts]
        rows.append([f"`{case}`", *("" if one is None else f"{one['ratio']:.2f}" for one in ratios)])
    differ, prompts = (sum(cell[name] for cell in cells) for name in ("different_answers", "prompts"))
    head = ["tokens/s, `auto` over `off`", *(f"{count} row{'s' * (count > 1)}" for count in counts)]
    return f"{table(head, rows)}\n{_thousands(differ)} of {_thousands(prompts)} answers differed.\n"


def place(report: Report) -> str:
    """The processor, its kernels and the type of numbers."""
    words = [processor(report)]
    words += [f"kernels `{report['machine']['kernels']}`"] if "kernels" in report["machine"] else []
    words += [report["dtype"]] if "dtype" in report else []
    return ", ".join(words)


def caption(report: Report) -> str:
    """Where and how it was measured."""
    threads = report.get("threads")
    words = [place(report), made(report)]
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
            f"{case['floor_ms']:.1f}", f"{case['ms']:.1f}", f"{case['step_over_floor']:.2f}", _over_base(report, name),
        ])  # fmt: skip
    whose = "products, own / oneDNN, ms" if "gemms_ms" in case else "products, ms"
    head = ["step", "weights, MB", "adapters + KV, MB", "GFLOP of the base", "products, GFLOP/s", "products, GB/s"]
    head += [whose, "floor, ms", "step, ms", "step / floor", "step / base"]
    bandwidth = (
        f"Reading at {report['read_bytes_per_second'] / 1e9:.1f} GB/s (a large tensor summed in the same run).\n"
    )
    return f"{bandwidth}\n{table(head, rows)}"


def _over_base(report: Report, name: str) -> str:
    """The median of the rounds' own ratios, where there is one."""
    ratio = report["ratios"].get(f"{name} / base")
    return "" if ratio is None else f"{ratio:.2f}"


def parts(report: Report) -> str:
    """Each part's share of the step."""
    rows = []
    for name, case in report["cases"].items():
        found = case["parts_ms"]
        rows.append([name, *(f"{found[part] / found['total']:.0%}" for part in PARTS)])
    return table(["step", *PARTS], rows)


def newer(report: Report) -> str:
    """Newer kinds of bases: each shape and type, without and with adapters."""
    rows = []
    for name, found in report["shapes"].items():
        for case, figures in found["cases"].items():
            keys = "step_over_floor", "step_over_fast_floor", "before_over_floor"
            ratios = [f"{figures[key]:.2f}" if key in figures else "" for key in keys]
            rows.append([
                name, case, f"{found['weights'] / 1e6:.0f}", _mb(figures["expert_bytes"]), _mb(figures["other_bytes"]),
                f"{figures['floor_ms']:.1f}", f"{figures['ms']:.1f}", *ratios,
            ])  # fmt: skip
    head = ["shape", "16 rows", "millions of weights", "experts, MB", "adapters + KV, MB", "floor, ms", "step, ms"]
    return table([*head, "step / floor", "/ floor in huge pages", "before"], rows)


def growth_file(report: Report) -> str:
    """The picture's name: of its kind of processor and its type."""
    return f"performance-growth-{report['machine'].get('kernels', 'avx2')}-{report['dtype']}.png"


def growth_picture(report: Report) -> str:
    return f"![How a step's cost grows]({growth_file(report)})\n"


def growth(name: str, unit: str, report: Report) -> str:
    """One panel in ratios: the first series beside its first point, the others beside the base."""
    panel = report["panels"][name]
    (first, values), *others = panel["series"].items()
    rows = [[f"{first}, times the first", *(f"{value / values[0]:.2f}" for value in values)]]
    for label, found in others:
        rows.append([f"{label} / {first}", *(f"{a / b:.2f}" for a, b in zip(found, values, strict=True))])
    return table([unit, *(_thousands(x) for x in panel["x"])], rows)


def registered(report: Report) -> str:
    """Microseconds, as they hold no model."""
    panel = report["panels"]["registered"]
    rows = [[label, *map(_number, values)] for label, values in panel["series"].items()]
    return table(["microseconds, by adapters registered", *(_thousands(x) for x in panel["x"])], rows)


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
            _thousands(run["num_adapters"]), str(run["slots"]), run["shape"], str(len(few)),
            f"{few[len(few) // 2]:.0f}", f"{all_of_them[len(few) // 2]:.0f}", f"{run['kept']:.2f}",
        ])  # fmt: skip
    head = ["registered", "slots", "shape", "rounds", "tokens/s with as many adapters as slots", "with all", "kept"]
    return table(head, rows)


def _number(value: float) -> str:
    """Three digits or so: a table holds microseconds of four magnitudes."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _thousands(number: float) -> str:
    return f"{number:,}".replace(",", " ")


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"
