"""transformers' own continuous batching; it knows no adapters per request, so base only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.environment import package_versions
from benchmarks.peers.seam import Checkpoints
from benchmarks.peers.worker import WorkerEngine, start_worker
from benchmarks.workload import Load


@dataclass(frozen=True, slots=True)
class TransformersBatching:
    """`ContinuousBatchingManager` in a child; runs on the project's own requirements."""

    dtype: str
    family: str = "transformers"
    popularities: Sequence[str] = ("base",)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def install(self) -> None:
        self.versions()

    def versions(self) -> Mapping[str, str]:
        return package_versions(sys.executable, ["torch", "transformers"])

    def start(self, checkpoints: Checkpoints, load: Load, num_threads: int) -> WorkerEngine:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.transformers_worker"]
        command += [str(checkpoints.model), self.dtype]
        return start_worker(command, checkpoints.scratch / f"{self.name}.log", num_threads)
