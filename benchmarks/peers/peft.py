"""PEFT, as its documentation serves several adapters: `generate(adapter_names=[...])`, one static batch at a time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.environment import package_versions
from benchmarks.peers.seam import POPULARITIES, Checkpoints
from benchmarks.peers.worker import WorkerEngine, start_worker
from benchmarks.workload import Load


@dataclass(frozen=True, slots=True)
class Peft:
    """Runs on the project's own test requirements."""

    dtype: str
    family: str = "peft"
    popularities: Sequence[str] = POPULARITIES

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def install(self) -> None:
        self.versions()

    def versions(self) -> Mapping[str, str]:
        return package_versions(sys.executable, ["peft", "torch", "transformers"])

    def start(self, checkpoints: Checkpoints, load: Load, num_threads: int) -> WorkerEngine:
        named = [f"{name}={folder}" for name, folder in checkpoints.adapters.items()]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.peft_worker"]
        command += [str(checkpoints.model), self.dtype, *named]
        return start_worker(command, checkpoints.scratch / f"{self.name}.log", num_threads)
