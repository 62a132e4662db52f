"""What must be back to before once it is quiet again: rows, blocks, slots, pins, tasks, threads, descriptors, files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

import torch

from tests.canary.house import House

PATIENCE = 60.0  # seconds for things to settle
POOLS = (
    "asyncio",
    "adapter-loader",
    "blobs",
    "staging",
    "registry",
    "large-bodies",
    "long-reads",
    "grammar",
    "masks",
    "ThreadPoolExecutor",
)  # grow to their own limit and stay
MAX_REDIS_CONNECTIONS = 64  # so do the pools of connections to Redis, all of them together


@dataclass(frozen=True)
class Figures:
    """A snapshot of a house at rest."""

    num_running: int
    num_waiting: int
    num_at_the_gate: int
    num_inside: int
    num_used_blocks: int
    rows_on_slots: int
    pinned_digests: frozenset[str]
    loading: tuple[str, ...]
    holds: int  # of blobs, in the catalog
    tasks: tuple[tuple[str, int], ...]
    threads: tuple[str, ...]
    descriptors: tuple[tuple[str, int], ...]
    redis_connections_beyond_limit: int
    temporary_files: tuple[str, ...]
    base_digest: str  # empty: the engine is not here

    @classmethod
    def of(cls, house: House) -> Figures:
        stats = house.on_loop(house.services.client.stats())
        pooled = Counter(socket=_num_pooled(house.settings.redis_url))
        return cls(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_at_the_gate=house.services.client.gate.num_requests,
            num_inside=house.services.lifecycle.num_inside,
            num_used_blocks=stats.num_blocks - stats.num_free_blocks,
            rows_on_slots=sum(slot.num_rows for slot in stats.slots),
            pinned_digests=frozenset(slot.digest for slot in stats.slots if slot.pinned),
            loading=stats.loading_digests,
            holds=len(house.services.catalog.leases.expired(house.services.catalog.ledger.state)),
            tasks=tuple(sorted(house.on_loop(_tasks()).items())),
            threads=tuple(sorted(t.name for t in threading.enumerate() if not t.name.startswith(POOLS))),
            descriptors=tuple(sorted((_descriptors() - pooled - Counter(socket=_num_parsers(house))).items())),
            redis_connections_beyond_limit=max(0, pooled.total() - MAX_REDIS_CONNECTIONS),
            temporary_files=tuple(sorted(path.name for path in (house.store / "tmp").iterdir())),
            base_digest=base_digest(house) if house.has_engine else "",
        )

    def differences(self, other: Figures) -> dict[str, tuple[Any, Any]]:
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return {name: _apart(was, now) for name, (was, now) in pairs.items() if was != now}


def at_rest(house: House) -> Figures:
    """Once nothing that began before is still under way, files for faster loads for instance."""
    deadline, wait = time.monotonic() + PATIENCE, threading.Event()
    before = Figures.of(house)
    while True:
        wait.wait(0.02)
        is_sweeping = house.services.registry.is_sweeping  # before the look at its task, which ends later
        now = Figures.of(house)
        is_quiet = not (now.temporary_files or is_sweeping)
        if (now == before and is_quiet) or time.monotonic() > deadline:
            return now
        before = now


def settled(house: House, before: Figures) -> dict[str, tuple[Any, Any]]:
    """What is still different after a while of patience; empty as soon as nothing is."""
    deadline, wait = time.monotonic() + PATIENCE, threading.Event()
    while (left := before.differences(Figures.of(house))) and time.monotonic() < deadline:
        wait.wait(0.02)
    return left


def _num_parsers(house: House) -> int:
    """Processes for large bodies: two at most are started, and stay."""
    pool = vars(house.services.large_bodies).get("_workers")
    return 0 if pool is None else len(pool._idle)


def _apart(was: Any, now: Any) -> tuple[Any, Any]:
    """Without the items that both have."""
    if isinstance(was, tuple):
        return tuple((Counter(was) - Counter(now)).elements()), tuple((Counter(now) - Counter(was)).elements())
    return was, now


def base_digest(house: House) -> str:
    """SHA-256 of the frozen weights as they lie in memory now, laid out plainly."""
    model: Any = house.parts.runner._model  # type: ignore[union-attr]
    digest = hashlib.sha256()
    for path, linear in sorted(model._linears.items()):
        digest.update(path.encode() + _bytes(linear.dense()))
    for name, tensor in sorted([*model.module.named_parameters(), *model.module.named_buffers()]):
        digest.update(name.encode() + _bytes(tensor.detach()))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


async def _tasks() -> Counter[str]:
    """The loop's tasks by the name of their coroutine, this one and loose ends of connections left out."""
    current = asyncio.current_task()
    return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks() if task is not current)


def _descriptors() -> Counter[str]:
    """Open files of this process: sockets and pipes by kind, others by path."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if not target.startswith("/proc/"):  # the times of threads, open for a moment
            kinds[target.partition(":[")[0]] += 1
    return kinds


def _num_pooled(redis_url: str | None) -> int:
    """Sockets whose other end is Redis, or was: its pools keep a dead one until it is wanted."""
    return (
        0 if redis_url is None else sum(_is_pooled(fd, urlsplit(redis_url).port) for fd in os.listdir("/proc/self/fd"))
    )


def _is_pooled(name: str, port: int | None) -> bool:
    try:
        is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        copy = os.dup(int(name)) if is_socket else None
    except OSError:  # it is closed by now
        return False
    if copy is None:
        return False
    with socket.socket(fileno=copy) as found:
        if found.family != socket.AF_INET or found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            return bool(found.getpeername()[1] == port)
        except OSError:
            return True
