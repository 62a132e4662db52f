"""How long a fleet takes to serve: seconds from its command to /ready, and to the last of its replicas.

    python -m benchmarks.fleet.start [--replicas 2] [--starts 3] [--engine ray] [--out FILE.json] [--flags ...]

The demo model and its tenants' adapters on a new store, in turn with `--engine process`. Processor time and memory are
of all processes below the command, Ray's own among them, when the last replica was there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.engines import engines_below
from benchmarks.fleet.site import READY_SECONDS, Site, add_arguments, engine_flags
from benchmarks.fleet.status import num_serving
from benchmarks.peers.processes import cpu_seconds, peak_rss, tree
from benchmarks.report import RESULTS, machine
from lora_serve.commands.demo import adapter_folders
from lora_serve.commands.server_process import ServerFailedError, ServerProcess

POLL = 0.05
AGAINST = "process"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet-start.json")
    add_arguments(parser, replicas=2)
    options = parser.parse_args(arguments)
    kinds = {options.engine: options.replicas if options.engine == "ray" else 1, AGAINST: 1}
    starts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(options.starts):
        for kind, replicas in kinds.items():
            starts[kind].append(one_start(kind, replicas, options))
            print(kind, starts[kind][-1], flush=True)
    report = {
        "machine": machine(),
        "command": "python -m benchmarks.fleet.start " + shlex.join(arguments or sys.argv[1:]),
        "replicas": options.replicas,
        **{kind: summary(found) for kind, found in starts.items()},
        "starts": starts,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({kind: report[kind] for kind in kinds}))
    return 0


def one_start(engine: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to /ready and until every replica serves; what it used of the machine until then, and to end it."""
    with tempfile.TemporaryDirectory(prefix="lora_serve-fleet-", dir=options.scratch) as scratch:
        site = Site(Path(scratch), dict(adapter_folders()))
        flags = site.flags(engine_flags(engine, replicas), *site.modules, *options.flags)
        started = time.perf_counter()
        with ServerProcess(flags, site.root / "log") as server:
            server.wait_until_ready(READY_SECONDS)
            ready = time.perf_counter() - started
            _wait_until_whole(server, engine, replicas, started)
            found: dict[str, Any] = {
                "ready_s": round(ready, 2),
                "whole_s": round(time.perf_counter() - started, 2),
                "cpu_s": round(cpu_seconds(server.pid), 2),
                "peak_rss": peak_rss(server.pid),
                "engines_peak_rss": sum(peak_rss(pid) for pid in engines_below([server.pid])),
                "processes": len(tree(server.pid)),
            }
            ending = time.perf_counter()
            code = server.stop()
            return {**found, "end_s": round(time.perf_counter() - ending, 2), "exit_code": code}


def _wait_until_whole(server: ServerProcess, engine: str, replicas: int, started: float) -> None:
    while engine == "ray" and num_serving(server.url) < replicas:
        if time.perf_counter() - started > READY_SECONDS:
            raise ServerFailedError(f"not all replicas came:\n{server.tail()}")
        time.sleep(POLL)


def summary(starts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians."""
    return {
        name: round(statistics.median(one[name] for one in starts), 2)
        for name in ("ready_s", "whole_s", "cpu_s", "peak_rss", "end_s")
    }


if __name__ == "__main__":
    sys.exit(main())
