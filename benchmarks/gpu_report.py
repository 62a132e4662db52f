"""All that a GPU should tell about the server, in parts that fit into a few minutes each.

    python -m benchmarks.gpu_report [PART ...] [--seconds 540] [--device cuda] [--shape 8b] [--out FILE.json]

- `truth`: the card's ceilings, the tests of `tests/gpu`, where a step's time goes by class of kernel, eager steps.
- `step`: the step beside its floor, with a prompt's chunk in it, over long contexts; in the same process without
  graphs, without joined layers, without compiled ones, and with adapters on queries and values alone.
- `server`: 16, 64 and 256 users of a real server, base and adapters of mixed ranks, greedy and sampled, prompts of 4k.
- `kinds`: experts beside a dense base of as many products, with LoRA of experts, and by transformers' own code; the
  base in FP8; a plain model's step compiled by torch, as a stand-in for a peer (`gpu_kinds.py`).
- `variants`: 64 users again without launching ahead, without joined layers, without compiled ones, in FP8.
- `rest`: prompts of 2k to 32k tokens, 1 000 registered adapters over 128 slots, what captures cost in memory and time,
  a capture without memory, the LoRA kernel under compute-sanitizer where that is installed.
- `crowd`: 256 adapters over 32 slots.

The most important come first. `--seconds` is the time for all of them together: what has not begun by then is noted as
"not run", and a failure as its error; the file is written after each figure, and what an earlier call left in it stays.
With `--device cpu` everything is run that a CPU can, on a tiny shape, to try the report itself: no figure counts.
Exits 3 where CUDA is asked for and torch sees none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_house import (
    WARM,
    House,
    bytes_per_second,
    long_row,
    release,
    seconds_of,
    synchronize,
    timed,
    with_prompt,
)
from benchmarks.gpu_kinds import capture_without_memory, kinds
from benchmarks.gpu_step import machine, registered_table
from benchmarks.gpu_world import SHAPES, mixed
from lora_serve.commands.bench.running import BASE, SpawnConfig, Spawned, default_cache, spawned

ROOT = Path(__file__).parents[1]
POINTS = ((1, 0), (1, 1), (16, 16), (64, 0), (64, 64))  # rows, different adapters
PROFILED = 4
CHUNKS = (16, 128, 512)  # of a prompt, beside 63 rows that decode
CONTEXTS = (512, 2048, 8192, 32768, 131072)
PROMPTS = (2048, 8192, 32768)
USERS = (64, 16, 256)  # the most important first
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (  # of the step
    ("graphs", {}),
    ("eager", {"graphs": False}),
    ("layers not joined", {"joined": False}),
    ("layers not compiled", {"compiled": False}),
    ("queries and values", {"ends": ("q_proj", "v_proj"), "targets": ("q_proj", "v_proj")}),
)
CLASSES = {  # of kernels, by the first pattern that their names match
    "attention": r"attn|attend|flash|fmha|decode_chunks|fold_chunks|scaled_dot",
    "LoRA": r"shrink|expand|lora",
    "product": r"gemm|gemv|cutlass|nvjet|cublas|splitk|addmm|::mm|matmul|linear",
    "copy": r"memcpy|memset|copy_|index_put|scatter|gather|index",
    "norm and rotary": r"reduce|norm|mean|rsqrt|pow|cat|neg",
    "elementwise": r"elementwise|vectorized|silu|mul|add",
}
RANKS = (8, 16, 32, 64)
SERVER_FLAGS = ("--max-num-seqs", "256", "--max-loras", "32", "--speculate", "off")
USUAL, LONG = "32-256", "4096"  # tokens of prompts
SAMPLED = json.dumps({"temperature": 0.8, "top_p": 0.9})


class Report:
    """The file, and the time that is left."""

    def __init__(self, file: Path, seconds: float, arguments: dict[str, Any]) -> None:
        self._file, self._end = file, time.monotonic() + seconds
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.found.setdefault("calls", []).append(arguments)

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def add(self, part: str, name: str, measure: Callable[[], Any], needs: float = 20.0) -> None:
        """Notes what `measure` returns, its error, or that fewer than `needs` seconds were left for it."""
        begun = time.monotonic()
        if self.seconds_left < needs:
            value: Any = "not run: no time was left"
        else:
            try:
                value = measure()
            except Exception as error:  # one figure that fails must not cost the others
                value = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            release()
        table = self.found.setdefault(part, {})
        if name not in table or not isinstance(value, str):  # what an earlier call measured stays
            table[name] = value
        print(f"{part} / {name} ({time.monotonic() - begun:.1f} s): {json.dumps(value)[:300]}", flush=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu-report.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server which it starts ends with it
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_report: torch sees no CUDA device here", file=sys.stderr)
        return 3
    arguments.shape = arguments.shape or ("8b" if arguments.device == "cuda" else "tiny")
    given = {name: value for name, value in vars(arguments).items() if name != "out"}
    report = Report(arguments.out, arguments.seconds, given)
    report.found["machine"] = machine() if arguments.device == "cuda" else {"gpu": "none: a trial on the CPU"}
    report.found["command"] = "python -m benchmarks.gpu_report"
    for part in arguments.parts or PARTS:
        PARTS[part](report, arguments)
    return 0


def truth(report: Report, arguments: argparse.Namespace) -> None:
    """What is so, before anything is changed."""
    report.add("truth", "ceilings", lambda: ceilings(arguments.device))
    house = House(arguments, num_rows=64, context=512)
    for num_rows, num_adapters in POINTS:
        name = f"{num_rows} rows, {num_adapters} adapters"
        report.add("truth", f"profile of {name}", lambda house=house, at=(num_rows, num_adapters): profiled(house, *at))
    del house
    if arguments.device == "cuda":
        report.add("truth", "tests", lambda: gpu_tests(report.seconds_left), needs=60.0)


def step(report: Report, arguments: argparse.Namespace) -> None:
    """The step, its variants side by side in one process."""
    bandwidth, few = bytes_per_second(arguments.device), 1 if arguments.device == "cpu" else None
    for name, world in VARIANTS[:few]:
        house = House(arguments, num_rows=256, context=512, **world)
        for at in (*POINTS, (256, 64)):
            report.add("step", f"{name}: {at[0]} rows, {at[1]} adapters", lambda h=house, a=at: timed(h, *a, bandwidth))
        for chunk in CHUNKS[:few]:
            what = f"{name}: 63 rows and {chunk} tokens of a prompt"
            report.add("step", f"{what}, base", lambda h=house, c=chunk: with_prompt(h, c, 0))
            report.add("step", f"{what}, 16 adapters", lambda h=house, c=chunk: with_prompt(h, c, 16))
        del house
    for context in CONTEXTS[:few]:
        report.add("step", f"1 row after {context} tokens", lambda c=context: long_row(arguments, c, bandwidth))


def server(report: Report, arguments: argparse.Namespace) -> None:
    """`lora-serve bench` against one server, users one after another as answers differ in length."""
    users = (4,) if arguments.device == "cpu" else USERS
    each = ((0, False), (16, False), (64, False), (16, True))
    loads = [(count, *load, USUAL) for count in users for load in each]
    ask_server(report, arguments, (), [*loads, (users[0], 16, False, LONG)])


def variants(report: Report, arguments: argparse.Namespace) -> None:
    """The server again without what makes it fast, each thing by itself."""
    users = 4 if arguments.device == "cpu" else USERS[0]
    for flags in (("--no-launch-ahead",), ("--no-fuse-layers",), ("--no-compile-layers",), ("--quantization", "fp8")):
        ask_server(report, arguments, flags, [(users, 0, False, USUAL), (users, 16, False, USUAL)])


def crowd(report: Report, arguments: argparse.Namespace) -> None:
    """More adapters than slots."""
    users, count = (4, 8) if arguments.device == "cpu" else (USERS[0], 256)
    ask_server(report, arguments, (), [(users, count, False, USUAL)], count, (8,))


def ask_server(
    report: Report, arguments: argparse.Namespace, flags: tuple[str, ...], loads: list[tuple[int, int, bool, str]],
    num_adapters: int = 64, ranks: tuple[int, ...] = RANKS,
) -> None:  # fmt: skip
    """`loads`: users, adapters, whether they sample, and the tokens of prompts."""
    num_adapters = min(num_adapters, 8) if arguments.device == "cpu" else num_adapters
    all_flags = ("--device", arguments.device, *SERVER_FLAGS, *flags)
    config = SpawnConfig(arguments.shape, num_adapters, ranks, default_cache(), all_flags)
    with ExitStack() as stack:
        running: list[Spawned] = []

        def start() -> dict[str, float]:
            running.append(stack.enter_context(spawned(config)))
            return {"ready_s": round(running[0].start_seconds, 1)}

        ends = f", {' '.join(flags)}" if flags else ""
        report.add("server", f"start with {num_adapters} adapters{ends}", start, needs=120.0)
        for users, wanted, sampled, prompts in loads:
            words = f"{users} users, {wanted or 'no'} adapters{', sampled' * sampled}, prompts of {prompts}{ends}"
            ask = partial(bench, running, users, min(wanted, num_adapters), sampled, prompts)
            report.add("server", words, ask, needs=45.0)


def rest(report: Report, arguments: argparse.Namespace) -> None:
    """Prompts, cold loads, captures."""
    for length in PROMPTS if arguments.device == "cuda" else PROMPTS[:1]:
        report.add("rest", f"a prompt of {length} tokens", lambda n=length: prompt_seconds(arguments, n))
    if arguments.device == "cuda":
        wanted = argparse.Namespace(**vars(arguments), context=512, block_size=16)
        report.add("rest", "registered", lambda: registered_table(wanted), needs=60.0)
        report.add("rest", "captures", lambda: captures(arguments))
        report.add("rest", "a capture without memory", lambda: capture_without_memory(arguments))
        if shutil.which("compute-sanitizer"):
            own = ("compute-sanitizer", "--error-exitcode", "9"), ("-k", "group_of_layers or new_owner")
            report.add("rest", "compute-sanitizer", lambda: gpu_tests(report.seconds_left, *own), needs=120.0)


PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "truth": truth,
    "step": step,
    "server": server,
    "kinds": kinds,
    "variants": variants,
    "rest": rest,
    "crowd": crowd,
}


def ceilings(device: str) -> dict[str, float]:
    """Bytes a second of a copy, operations a second of a large product, microseconds of a launch."""
    side = 8192 if device == "cuda" else 256
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    small = torch.zeros(1, device=device)
    return {
        "copy GB/s": round(bytes_per_second(device) / 1e9, 1),
        "product TFLOP/s": round(2 * side**3 / seconds_of(lambda: a @ b, device) / 1e12, 2),
        "launch us": round(seconds_of(lambda: [small.add_(1) for _ in range(1000)], device) * 1e3, 2),
    }


def prompt_seconds(arguments: argparse.Namespace, length: int) -> dict[str, float]:
    """One prompt, in one pass and in chunks of 2 048 tokens."""
    house = House(arguments, num_rows=1, context=length, steps=1)
    found = {}
    for name, size in (("one pass", length), ("chunks of 2048", 2048)):
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            for start in range(0, length, size):
                house.world.runner.run(mixed(house.world, 0, house.rows(1, 0), size, start))
            times.append(time.perf_counter() - begun)
        found[name] = statistics.median(times)
    ratio = found["chunks of 2048"] / found["one pass"]
    return {f"{name} ms": round(1e3 * value, 2) for name, value in found.items()} | {"ratio": round(ratio, 3)}


def profiled(house: House, num_rows: int, num_adapters: int) -> dict[str, Any]:
    """Milliseconds of a step by class of kernel, launches, and the time in which nothing ran."""
    rows = house.rows(num_rows, num_adapters)
    for number in range(WARM):
        house.world.runner.run(house.world.batch(number, rows))
    synchronize(house.device)
    activity = ProfilerActivity.CUDA if house.device.type == "cuda" else ProfilerActivity.CPU
    begun = time.perf_counter()
    with profile(activities=[activity]) as trace:
        for number in range(WARM, WARM + PROFILED):
            house.world.runner.run(house.world.batch(number, rows))
        synchronize(house.device)
    wall = time.perf_counter() - begun
    spent: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    num_launches = 0
    for event in trace.events():
        on_device = event.device_type.name == "CUDA"
        if on_device != (house.device.type == "cuda"):
            continue
        seconds = (event.device_time if on_device else event.self_cpu_time_total) / 1e6
        spent[class_of(event.name)] += seconds
        names[event.name[:80]] += seconds
        num_launches += 1
    busy = sum(spent.values())
    slowest = sorted(names.items(), key=lambda item: -item[1])[:12]
    return {
        "step_ms": round(wall / PROFILED * 1e3, 3),
        "idle_ms": round(max(0.0, wall - busy) / PROFILED * 1e3, 3),  # the profiler's own time is in it
        "launches": num_launches // PROFILED,
        "ms_by_class": {name: round(value / PROFILED * 1e3, 3) for name, value in sorted(spent.items())},
        "slowest_ms": {name: round(value / PROFILED * 1e3, 3) for name, value in slowest},
    }


def class_of(kernel: str) -> str:
    """The class of a kernel, by its name."""
    return next((name for name, words in CLASSES.items() if re.search(words, kernel, re.IGNORECASE)), "other")


def captures(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds and bytes of the first step of each number of rows, which is captured."""
    house = House(arguments, num_rows=256, context=64, steps=2)
    found = []
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        before, begun = torch.cuda.mem_get_info()[0], time.perf_counter()
        house.world.runner.run(house.world.batch(0, house.rows(num_rows, 1)))
        torch.cuda.synchronize()
        seconds, num_bytes = time.perf_counter() - begun, before - torch.cuda.mem_get_info()[0]
        found.append({"rows": num_rows, "seconds": round(seconds, 3), "MiB": round(num_bytes / 2**20, 1)})
    return found


def gpu_tests(seconds: float, before: tuple[str, ...] = (), chosen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The tests that only a GPU can run."""
    command = [*before, sys.executable, "-m", "pytest", "-q", *chosen, "-c", "tests/gpu/pytest.ini", "--rootdir", ".",
               "--confcutdir", "tests/gpu", "--import-mode", "importlib", "tests/gpu"]  # fmt: skip
    own = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=own, capture_output=True, text=True, timeout=seconds)
    return {"code": done.returncode, "end": done.stdout.strip().splitlines()[-12:]}


def bench(running: list[Spawned], num_users: int, num_adapters: int, sampled: bool, prompts: str) -> dict[str, Any]:
    """Tokens a second, and what a user waits for, of answers that end at different times."""
    command = [
        sys.executable, "-m", "lora_serve", "bench", "--url", running[0].process.url, "--model", BASE,
        "--adapters", str(max(1, num_adapters)), "--popularity", "uniform" if num_adapters else "base",
        "--concurrency", str(num_users), "--num-requests", str(4 * num_users),
        "--warmup-requests", str(max(2, num_adapters)), "--prompt-tokens", prompts, "--output-tokens", "64-192",
        "--seed", str(num_users), "--json", *(["--extra-body", SAMPLED] if sampled else []),
    ]  # fmt: skip
    before = counters(running[0].process.url)
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:] or done.stdout.strip()[-500:])
    found = json.loads(done.stdout)
    steps, replayed = (after - b for after, b in zip(counters(running[0].process.url), before, strict=True))
    names = ("failed", "output_tokens_per_s", "prompt_tokens_per_s", "ttft_ms", "itl_ms")
    return {name: found[name] for name in names} | {"steps": steps, "captured_share": round(replayed / steps, 3)}


def counters(url: str) -> tuple[float, float]:
    """The server's steps, and those that replayed a captured graph."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    names = ("vllm:iteration_tokens_total_count", "lora_serve_graph_steps_total")
    steps, replayed = (sum(float(value) for key, _, value in lines if key.partition("{")[0] == name) for name in names)
    return steps, replayed


if __name__ == "__main__":
    sys.exit(main())
