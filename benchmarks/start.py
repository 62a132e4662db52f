"""How long a server takes to be ready, and how much memory it needs at most.

    python -m benchmarks.start [--shape 135m] [--adapters 32] [--starts 5] [--out FILE.json]

A real server process each time, with a KV budget of 256 MB and slots for every adapter. "first": a new store, the
adapters named by --lora-modules, so that each is checked, probed and copied before /ready. "again": the store of a
server that had them registered. Seconds from starting the process to /ready answering 200, the median of `--starts`.
Then a closed loop over all adapters, 16 at a time, and the most memory that the process ever held (Linux' VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoints
from benchmarks.http_load import run_http
from benchmarks.report import kernel_level, machine, result_file
from benchmarks.workload import Load, make_jobs
from lora_serve.commands.server_process import ServerProcess

BASE = "bench-base"
KV_BYTES = 256 * 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"), help="folder of checkpoints")
    parser.add_argument("--out", type=Path, help="default: results/start-<kernels' level>.json")
    options = parser.parse_args()
    out: Path = options.out or result_file("start", kernel_level())
    model, folders = make_checkpoints(options.cache, options.shape, options.adapters, 0)
    load = Load(num_requests=options.requests)
    starts = []
    for number in range(options.starts):
        with tempfile.TemporaryDirectory() as scratch:
            here, slots = Path(scratch), options.adapters
            first = one_start(arguments(model, folders, here, slots), here / "log", [], None)
            again = one_start(arguments(model, {}, here, slots), here / "log", list(folders), load)
        starts.append({"first": first, "again": again})
        print(number, starts[-1], flush=True)
    report = {
        "machine": machine(),
        "command": f"python -m benchmarks.start --shape {options.shape} --adapters {options.adapters} "
        f"--starts {options.starts} --requests {options.requests}",
        "shape": options.shape,
        "adapters": options.adapters,
        "kv_bytes": KV_BYTES,
        **summary(starts),
        "starts": starts,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(summary(starts)))


def arguments(model: Path, folders: Mapping[str, Path], scratch: Path, num_slots: int) -> list[str]:
    """Of the server; `folders`: adapters to register at start."""
    found = ["--model", str(model), "--served-model-name", BASE, "--store", str(scratch / "store")]
    found += ["--kv-cache-memory", str(KV_BYTES), "--max-loras", str(num_slots), "--max-model-len", "512"]
    for name, folder in folders.items():
        found += ["--lora-modules", f"{name}={folder.resolve()}"]
    return found


def one_start(flags: Sequence[str], log: Path, names: list[str], load: Load | None) -> dict[str, float]:
    """Seconds to /ready, bytes held then and at most; with `load` after it was served."""
    start = time.perf_counter()
    with ServerProcess(flags, log) as server:
        server.wait_until_ready(600)
        ready = time.perf_counter() - start
        found = {"ready_s": round(ready, 2), "ready_cpu_s": processor_seconds(server.pid)}
        found["ready_rss"] = memory_of(server.pid, "VmRSS")
        if load is not None:
            measured = run_http(server.url, BASE, make_jobs(load, "uniform", names, VOCAB_SIZE), load)
            found["failed"] = measured.num_failed
        return found | {"peak_rss": memory_of(server.pid, "VmHWM")}


def memory_of(pid: int, field: str) -> int:
    """Bytes of "VmRSS" (resident now) or "VmHWM" (at most so far) of a process, from /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def processor_seconds(pid: int) -> float:
    """Seconds that all threads of a process have computed for; a busy machine changes them less than the clock's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(starts: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of the times, the largest of the peaks."""
    return {
        "first_ready_s": statistics.median(one["first"]["ready_s"] for one in starts),
        "again_ready_s": statistics.median(one["again"]["ready_s"] for one in starts),
        "again_ready_cpu_s": statistics.median(one["again"]["ready_cpu_s"] for one in starts),
        "peak_rss": max(one["again"]["peak_rss"] for one in starts),
        "failed": sum(one["again"].get("failed", 0) for one in starts),
    }


if __name__ == "__main__":
    main()
