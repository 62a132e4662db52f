"""A server on cores that others use too: tokens per second beside neighbours that compute all the time.

    python -m benchmarks.contended_cores [--rounds N] [--seconds S] [--write]

Two servers on the demo model take turns in one run, with 1 and 16 streams and 0, 1 and 2 neighbours: the program as it
is, and one whose OpenMP team always spins at the end of a parallel loop, as the library does by itself
(lora_serve/model/system/threads.py). Each figure is the median over the rounds; the ratio is that of each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.console import KEY, child, serving
from benchmarks.report import machine, result_file
from lora_serve.commands.server_process import ServerProcess

SPINNING = [sys.executable, "-m", "benchmarks.contended_cores", "always-spinning"]
SETTLED = 3.0  # seconds until the team has looked at its cores, and the streams have begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--write", action="store_true", help="benchmarks/results/contended-cores.json")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        serving(Path(one), "thread") as now,
        serving(Path(other), "thread", SPINNING) as spinning,
    ):
        cases = [
            case(now, spinning, num_rows, num_neighbours, options.rounds, options.seconds)
            for num_rows in (1, 16)
            for num_neighbours in (0, 1, 2)
        ]
    command = " ".join(["python -m benchmarks.contended_cores", *sys.argv[1:]])
    report = {"command": command, "machine": machine(), "cases": cases}
    if options.write:
        result_file("contended-cores").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(cases, indent=1))
    return 0


def case(
    now: ServerProcess, spinning: ServerProcess, num_rows: int, num_neighbours: int, rounds: int, seconds: float
) -> dict[str, object]:
    with neighbours(num_neighbours):
        pairs = [[tokens_per_second(server, num_rows, seconds) for server in (now, spinning)] for _ in range(rounds)]
    return {
        "streams": num_rows,
        "neighbours": num_neighbours,
        "tokens_per_s": round(statistics.median(pair[0] for pair in pairs), 1),
        "always_spinning_tokens_per_s": round(statistics.median(pair[1] for pair in pairs), 1),
        "ratio": round(statistics.median(pair[0] / pair[1] for pair in pairs), 2),
        "ratios": [round(pair[0] / pair[1], 2) for pair in pairs],
    }


def tokens_per_second(server: ServerProcess, num_rows: int, seconds: float) -> float:
    with child("load", server.url, str(num_rows)):
        time.sleep(SETTLED)
        before, start = tokens_of(server), time.monotonic()
        time.sleep(seconds)
        return (tokens_of(server) - before) / (time.monotonic() - start)


def tokens_of(server: ServerProcess) -> float:
    """Generated since the start."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(sample.value for one in families if one.name == "vllm:generation_tokens" for sample in one.samples)


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Processes that compute until the end of the block."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def serve_always_spinning(arguments: list[str]) -> int:
    """`lora-serve` whose team is left as the library has it."""
    from lora_serve.cli import main as lora_serve
    from lora_serve.model import build

    build.team_waits = lambda device: None
    return lora_serve(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["always-spinning"]:
        sys.exit(serve_always_spinning(sys.argv[sys.argv.index("lora_serve") + 1 :]))
    sys.exit(main())
