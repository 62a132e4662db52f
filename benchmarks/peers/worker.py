"""A library as an engine: a child reads one JSON line of jobs at a time and answers each with one line of times."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import Child, environment_of
from benchmarks.workload import Job, Load, Measured, Sample

Work = Callable[[list[dict[str, Any]], dict[str, int]], Iterable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """The parent's side; the child is idle between two `run` calls."""

    child: Child
    start_seconds: float

    @property
    def pid(self) -> int:
        return self.child.pid

    def run(self, jobs: Sequence[Job], load: Load) -> Measured:
        stream = self.child.process.stdin
        assert stream is not None
        line = json.dumps({"jobs": [asdict(job) for job in jobs], "load": asdict(load)})
        try:
            stream.write(line.encode() + b"\n")
            stream.flush()
        except OSError:
            raise self.child.failed("ended before a load") from None
        answer = read_line(self.child)
        samples = [
            Sample(item["first_token"], tuple(item["gaps"]), tuple(item["token_ids"]), index)
            for index, item in enumerate(answer["samples"])
        ]
        whole = tuple(sample for sample in samples if sample.num_tokens == load.output_tokens)
        return Measured(answer["seconds"], whole, len(jobs) - len(whole))

    def stop(self) -> None:
        self.child.stop()


def start_worker(command: Sequence[str], log: Path, num_threads: int) -> WorkerEngine:
    """Return when it has loaded its model. Raises PeerError with its last words."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = Child(command, log, environment_of(num_threads), **pipes)
    read_line(child)
    return WorkerEngine(child, time.perf_counter() - child.started)


def read_line(child: Child) -> dict[str, Any]:
    """Raises PeerError if it has ended."""
    assert child.process.stdout is not None
    line = child.process.stdout.readline()
    if not line:
        child.process.wait()
        raise child.failed("ended")
    return dict(json.loads(line))


def answer_lines(lines: Iterable[str], work: Work) -> None:
    """The child's side: says that it is ready, then works line by line; `work(jobs, load)` gives samples in order."""
    print(json.dumps({"ready": True}), flush=True)
    for line in lines:
        request = json.loads(line)
        start = time.perf_counter()
        samples = list(work(request["jobs"], request["load"]))
        print(json.dumps({"seconds": time.perf_counter() - start, "samples": samples}), flush=True)
