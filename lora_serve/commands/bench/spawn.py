"""Starts a server of this project on random weights for one load. The only part of the bench that makes tensors."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_serve.commands.server_process import ServerProcess

BASE = "bench-base"
READY_SECONDS = 900.0
MAX_SLOTS = 64  # adapters on the device at once, unless --server-flags say otherwise


@dataclass(frozen=True, slots=True)
class SpawnConfig:
    """The spawned server: `num_adapters` with `ranks` in turn are registered before it is ready."""

    shape: str
    num_adapters: int
    ranks: tuple[int, ...]
    cache: Path
    server_flags: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Spawned:
    """A running server."""

    process: ServerProcess
    adapters: tuple[str, ...]
    start_seconds: float  # to /ready

    def peak_rss(self) -> int | None:
        """The largest resident memory so far, in bytes; None where /proc does not tell."""
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lora_serve" / "bench"


@contextmanager
def spawned(config: SpawnConfig) -> Iterator[Spawned]:
    """A server for as long as the block lasts, on checkpoints that are made if missing. Raises ServerFailedError."""
    from lora_serve.random_weights.adapters import make_adapters
    from lora_serve.random_weights.model import make_model

    model = make_model(config.cache, config.shape, config.seed)
    adapters = make_adapters(config.cache, config.shape, config.num_adapters, config.seed, config.ranks)
    with tempfile.TemporaryDirectory(prefix="lora_serve_bench_") as folder:
        arguments = _arguments(config, model, adapters, Path(folder) / "store")
        started = time.perf_counter()
        with ServerProcess(arguments, Path(folder) / "server.log") as process:
            process.wait_until_ready(READY_SECONDS)
            yield Spawned(process, tuple(adapters), time.perf_counter() - started)


def _arguments(config: SpawnConfig, model: Path, adapters: dict[str, Path], store: Path) -> Sequence[str]:
    slots = max(1, min(config.num_adapters, MAX_SLOTS))
    arguments = ["--model", str(model), "--served-model-name", BASE, "--store", str(store), "--max-loras", str(slots)]
    if adapters:
        arguments += ["--lora-modules", *(f"{name}={folder}" for name, folder in adapters.items())]
    return [*arguments, *config.server_flags]
