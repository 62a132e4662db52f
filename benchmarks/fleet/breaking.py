"""Faults of a fleet under load, by name: each breaks things until the load ends, and notes when."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from benchmarks.fleet.engines import engines_below, is_alive, signal_to
from benchmarks.fleet.load import Stage
from lora_serve.commands.server_process import ServerProcess
from tests.redis_server import RedisServer

EVERY = 10.0  # seconds between two kills
FIRST = 5.0  # seconds of load before anything is broken
HANG = 15.0  # seconds that a replica stands still
AWAY = 10.0  # seconds that Redis is away
REPLACED = 300.0  # seconds at most until the replicas are those that a gateway wants; the load goes on until then
POLL = 0.2


@dataclass
class Fleet:
    """What can be broken. `roots`: processes below which engines are looked for. `another`: one more gateway of the
    same cluster, by the replicas and the flags that it asks for; whoever comes last is obeyed.
    """

    gateways: Sequence[ServerProcess]
    replicas: int
    rows: int  # that a replica runs at a time: so many streams may be cut by its end
    roots: Sequence[int]
    another: Callable[[int, Sequence[str]], AbstractContextManager[ServerProcess]]
    redis: RedisServer | None = None
    random: random.Random = field(default_factory=lambda: random.Random(5))

    async def engines(self) -> list[int]:
        return await asyncio.to_thread(engines_below, self.roots)


Breaking = Callable[[Fleet, Stage], Awaitable[None]]


async def nothing(fleet: Fleet, stage: Stage) -> None:
    """For figures without a fault."""


async def kill(fleet: Fleet, stage: Stage) -> None:
    """kill -9 of the replica that has lived longest, every ten seconds: one that serves, and the others in turn."""
    await asyncio.sleep(FIRST)
    while stage.left > 0:
        started = stage.now
        if engines := await fleet.engines():
            pid = engines[0]
            signal_to(pid, signal.SIGKILL)
            stage.note(f"kill -9 of replica {pid}, one of {len(engines)}", may_cut=fleet.rows)
        await asyncio.sleep(max(0.0, min(EVERY - (stage.now - started), stage.left)))


async def hang(fleet: Fleet, stage: Stage) -> None:
    """SIGSTOP of a replica for longer than any watchdog waits, again and again; it goes on if nobody replaced it."""
    await asyncio.sleep(FIRST)
    while stage.left > HANG and (engines := await fleet.engines()):
        pid, since = fleet.random.choice(engines), stage.now
        signal_to(pid, signal.SIGSTOP)
        await asyncio.sleep(HANG)
        was_replaced = not is_alive(pid)
        signal_to(pid, signal.SIGCONT)
        stage.note(
            f"replica {pid} stood still, {'was replaced' if was_replaced else 'went on'}", since, may_cut=fleet.rows
        )
        await asyncio.sleep(EVERY)


async def gateway(fleet: Fleet, stage: Stage) -> None:
    """kill -9 of the last gateway: it loses its own connections, and nobody else anything."""
    await asyncio.sleep(max(FIRST, stage.seconds / 3))
    number = len(fleet.gateways) - 1
    stage.gone.add(number)
    signal_to(fleet.gateways[number].pid, signal.SIGKILL)
    stage.note(f"kill -9 of gateway {number}", gateway=number, may_cut=0)


async def redis(fleet: Fleet, stage: Stage) -> None:
    """Redis killed for ten seconds, and back."""
    assert fleet.redis is not None
    await asyncio.sleep(FIRST)
    while stage.left > AWAY:
        since = stage.now
        await asyncio.to_thread(fleet.redis.kill)
        await asyncio.sleep(AWAY)
        await asyncio.to_thread(fleet.redis.start)
        stage.note("Redis was away", since, may_cut=0)
        await asyncio.sleep(EVERY)


async def update(fleet: Fleet, stage: Stage) -> None:
    """Another gateway joins with other settings of the engines: Serve replaces the replicas one by one."""
    await _joined_by(fleet, stage, fleet.replicas, ["--max-num-seqs", str(fleet.rows - 1)])


async def scale(fleet: Fleet, stage: Stage) -> None:
    """Another gateway joins that wants one replica less, and when it has left one that wants as many as before."""
    await _joined_by(fleet, stage, fleet.replicas - 1, [])
    await _joined_by(fleet, stage, fleet.replicas, [])


async def _joined_by(fleet: Fleet, stage: Stage, replicas: int, flags: Sequence[str]) -> None:
    """Until the replicas are those that it wants."""
    await asyncio.sleep(FIRST)
    since, before = stage.now, set(await fleet.engines())
    joined = fleet.another(replicas, flags)
    await asyncio.to_thread(joined.__enter__)
    try:
        now = before
        while stage.now < since + REPLACED and (len(now) != replicas or (flags and now & before)):
            await asyncio.sleep(POLL)
            now = set(await fleet.engines())
    finally:
        await asyncio.to_thread(joined.__exit__, None, None, None)
    if len(now) != replicas or (flags and now & before):
        stage.unfinished.append(f"replicas {sorted(before)} were to become {replicas}, and are {sorted(now)}")
    stage.note(f"{len(before)} replicas became {len(now)}, {len(now & before)} of them the same", since, may_cut=0)


async def until_whole(fleet: Fleet, patience: float) -> float | None:
    """Seconds until there are as many engines as there were and every gateway is ready; None: it never was."""
    for tried in itertools.count():
        alive = [server for server in fleet.gateways if server.exit_code is None]
        ready = [await asyncio.to_thread(server.is_ready) for server in alive]
        if len(await fleet.engines()) == fleet.replicas and all(ready):
            return tried * POLL
        if tried * POLL > patience:
            return None
        await asyncio.sleep(POLL)
    raise AssertionError


BREAKING: dict[str, Breaking] = {each.__name__: each for each in (nothing, kill, hang, gateway, redis, update, scale)}
