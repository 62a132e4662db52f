"""Servers of the fleet's measurements: the demo model or a larger one, adapters of made-up numbers, one store for all
in turn.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_serve.commands.demo import DATA
from lora_serve.commands.server_process import HOST, ServerProcess
from lora_serve.random_weights.checkpoints import linear_sizes, make_model, write_adapter

BASE = "demo-base"
KEY = "admin-key-of-the-bench"
ADMIN = {"Authorization": f"Bearer {KEY}"}
ENGINES = ("thread", "process", "ray")
READY_SECONDS = 300.0
RANK = 8
DEMO = "demo"  # the name of the demo's model among those of SHAPES


@dataclass(frozen=True)
class Site:
    """Files that servers share. `adapters`: ids and folders; the store knows them once a server was given `modules`."""

    root: Path
    adapters: dict[str, Path]
    model: Path = DATA / "model"

    @property
    def modules(self) -> tuple[str, ...]:
        """Flags that register every adapter at the start."""
        return ("--lora-modules", *(f"{name}={folder}" for name, folder in self.adapters.items()))

    def flags(self, engine: Sequence[str], *more: str) -> list[str]:
        """Of `serve`. `engine`: those that say where the engines run; nobody else is given the store meanwhile."""
        return [
            "--model", str(self.model), "--served-model-name", BASE, "--store", str(self.root / "store"),
            "--adapter-root", str(self.root), "--admin-key", KEY, "--admin-acts-per-minute", "0",
            "--max-model-len", "256", *engine, *more,
        ]  # fmt: skip

    @contextmanager
    def server(
        self, name: str, engine: Sequence[str], *more: str, host: str = HOST, inside: Sequence[str] = ()
    ) -> Iterator[ServerProcess]:
        """A server that is ready; its log is `name`.log. `host`, `inside`: see `ServerProcess`."""
        log = self.root / f"{name}.log"
        with ServerProcess(self.flags(engine, *more), log, host=host, inside=inside) as process:
            process.wait_until_ready(READY_SECONDS)
            yield process


@contextmanager
def made_site(num_adapters: int, folder: Path | None = None, model: str = DEMO) -> Iterator[Site]:
    """A site with so many adapters, in a folder in `folder` that is gone afterwards. `model`: DEMO, or a shape."""
    with tempfile.TemporaryDirectory(prefix="lora_serve-fleet-", dir=folder) as scratch:
        root = Path(scratch)
        weights = DATA / "model" if model == DEMO else make_model(root / "model", model, seed=0)
        sizes = linear_sizes(weights)
        adapters = {
            f"tenant{index % 8}/a{index:03d}": root / "adapters" / f"a{index:03d}" for index in range(num_adapters)
        }
        for index, target in enumerate(adapters.values()):
            target.mkdir(parents=True)
            write_adapter(target, sizes, RANK, seed=1000 + index)
        yield Site(root, adapters, weights)


def engine_flags(engine: str, replicas: int, more: Sequence[str] = ()) -> list[str]:
    """Where the engines run: `replicas` counts for "ray" only."""
    return ["--engine", engine, *(("--replicas", str(replicas)) if engine == "ray" else ()), *more]


def add_arguments(parser: argparse.ArgumentParser, replicas: int) -> None:
    """Options of every measurement of a fleet."""
    parser.add_argument("--engine", choices=ENGINES, default="ray", help="where the engines run that are measured")
    parser.add_argument("--replicas", type=int, default=replicas)
    parser.add_argument("--scratch", type=Path, help="folder of stores and logs (default: the system's)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="the rest: more flags of the server")
