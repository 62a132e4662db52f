"""A server of a reliability run, and what it uses of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from lora_serve.commands.server_process import ServerProcess
from tests.canary.questions import BASE, World, make_world
from tests.canary.races import Field, make_field

KEY = "admin-key-of-the-tests"
ADMIN = {"Authorization": f"Bearer {KEY}"}
NUM_ADAPTERS = 64


@dataclass(frozen=True)
class Site:
    """Files that all parts share."""

    world: World
    runners: Field
    root: Path

    @contextmanager
    def server(self, name: str, *flags: str, modules: bool = False) -> Iterator[ServerProcess]:
        arguments = [
            "--model", str(self.world.model), "--served-model-name", BASE, "--admin-key", KEY,
            "--store", str(self.root / name), "--adapter-root", str(self.root), "--max-model-len", "96",
            "--kv-cache-memory", "4MiB", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--warmup", "off",
            *flags,
        ]  # fmt: skip
        if modules:
            arguments += ["--lora-modules", *self.world.modules()]
        with ServerProcess(arguments, self.root / f"{name}.log") as process:
            process.wait_until_ready(300)
            yield process


def make_site(root: Path) -> Site:
    world = make_world(root / "world")
    return Site(world, make_field(world.model, world.adapters["acme/a"], root / "racers", NUM_ADAPTERS), root)


async def get(process: ServerProcess, path: str) -> Any:
    async with aiohttp.ClientSession(process.url, headers=ADMIN) as session, session.get(path) as response:
        return await response.json()


def usage_of(process: ServerProcess) -> dict[str, float]:
    """Resident memory in MiB, open descriptors, threads."""
    folder = Path("/proc") / str(process.pid)
    lines = (folder / "status").read_text().splitlines()
    memory = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return {
        "memory": memory / 1024,
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }
