"""This server."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lora_serve
from benchmarks.peers.environment import package_versions
from benchmarks.peers.http_engine import HttpEngine
from benchmarks.peers.processes import Child, environment_of
from benchmarks.peers.seam import BASE, MAX_MODEL_LEN, POPULARITIES, Checkpoints
from benchmarks.workload import Load
from lora_serve.commands.bench.workload import Target
from lora_serve.commands.server_process import HOST, free_port
from lora_serve.core.process import without_settings

KV_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class LoraServe:
    """`flags` of `lora-serve serve` besides those of the load."""

    flags: Sequence[str] = ()
    name: str = "lora_serve"
    family: str = "lora_serve"
    popularities: Sequence[str] = POPULARITIES

    def install(self) -> None:
        """It is what runs this."""

    def versions(self) -> Mapping[str, str]:
        return {"lora_serve": lora_serve.__version__} | dict(
            package_versions(sys.executable, ["torch", "transformers"])
        )

    def start(self, checkpoints: Checkpoints, load: Load, num_threads: int) -> HttpEngine:
        port = free_port()
        environment = without_settings(environment_of(num_threads))  # it does what its command line says
        command = [sys.executable, "-m", "lora_serve", "serve", *self._arguments(checkpoints, load, port)]
        child = Child(command, checkpoints.scratch / f"{self.name}.log", environment)
        seconds = child.wait_until_answers(port, "/ready")
        return HttpEngine(child, Target(f"http://{HOST}:{port}", BASE), seconds)

    def _arguments(self, checkpoints: Checkpoints, load: Load, port: int) -> list[str]:
        store = checkpoints.scratch / f"{self.name}-store"
        arguments = [
            "--host", HOST, "--port", str(port), "--model", str(checkpoints.model), "--served-model-name", BASE,
            "--store", str(store), "--max-loras", "16", "--max-num-seqs", str(load.concurrency),
            "--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory", str(KV_CACHE_BYTES),
            "--no-enable-prefix-caching",
        ]  # fmt: skip
        for name, folder in checkpoints.adapters.items():
            arguments += ["--lora-modules", f"{name}={folder}"]
        return [*arguments, *self.flags]
