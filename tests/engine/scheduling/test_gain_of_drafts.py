"""Drafts on machines whose cost is known, under clocks that are disturbed: they pay for sure, or there are none.

Speeds are tokens over the seconds that the machine would have taken undisturbed: the engine never sees those.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lora_serve.core.batch import Batch, NextToken, Row, RowOutput, StepLoad
from tests.engine.world import VirtualClock, World

Machine = Callable[[StepLoad], float]


def reads_weights(load: StepLoad) -> float:
    """Bound by memory: a few more tokens cost next to nothing."""
    return 5e-3 + 2e-5 * (load.num_tokens + load.num_drafted)


def multiplies(load: StepLoad) -> float:
    """Bound by arithmetic: a guess costs what a token costs."""
    return 2e-4 + 3e-4 * (load.num_tokens + load.num_drafted)


def in_tiles(load: StepLoad) -> float:
    """Bound by arithmetic in tiles of 16 rows, which no sum of costs describes."""
    return 1e-3 + 3e-3 * -(-(load.num_tokens + load.num_drafted) // 16)


def either(load: StepLoad) -> float:
    """Bound by memory up to 8 tokens, then by arithmetic."""
    return max(2.4e-3, multiplies(load))


@dataclass
class Disturbance:
    """The factors by which steps take longer than they should, of a machine that others use as well."""

    generator: random.Random
    spell: float = 1.0
    left: int = 0

    def __call__(self) -> float:
        if self.left == 0:
            self.spell, self.left = self.generator.choice([1.0, 1.0, 1.4]), self.generator.randint(20, 120)
        self.left -= 1
        interrupted = self.generator.uniform(2, 20) if self.generator.random() < 0.03 else 1.0
        return self.spell * interrupted * self.generator.lognormvariate(0, 0.15)


@dataclass
class Trial:
    """An engine that is kept busy with so many rows of text, `regularity` of whose tokens can be guessed."""

    machine: Machine
    regularity: float
    speculate: str = "auto"
    seed: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_requests: int = 0
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self.disturbance = Disturbance(random.Random(self.seed))
        self.world = World(
            4096, clock=self.clock, speculate=self.speculate, max_num_seqs=64, max_num_batched_tokens=512
        )
        self.world.engine._runner.run = self.run  # type: ignore[method-assign]

    def run(self, batch: Batch) -> list[RowOutput]:
        seconds = self.machine(batch.load)
        self.seconds += seconds
        self.clock.now += seconds * self.disturbance()
        return [self.row(row) for row in batch.rows]

    def row(self, row: Row) -> RowOutput:
        if row.sample is None:
            return RowOutput(row.sequence_id, None)
        num_known = len(row.token_ids) - row.num_draft
        known, draft = row.token_ids[:num_known], row.token_ids[num_known:]
        found = [self.token(row.sequence_id, row.start + num_known, known[-1])]
        while len(found) <= len(draft) and found[-1] == draft[len(found) - 1]:
            found.append(self.token(row.sequence_id, row.start + num_known + len(found), found[-1]))
        return RowOutput(row.sequence_id, found[0], following=tuple(map(NextToken, found[1:])))

    def token(self, sequence_id: int, position: int, last: int) -> int:
        generator = random.Random(1000 * sequence_id + position)
        return (last + 1) % 20 if generator.random() < self.regularity else generator.randrange(1500)

    def speed(self, num_rows: int, num_steps: int) -> float:
        """Tokens per undisturbed second over so many steps with so many rows."""
        tokens, seconds = self.count(), self.seconds
        for _ in range(num_steps):
            while len(self.world.scheduler.running) + len(self.world.scheduler.waiting) < num_rows:
                start, length = self.num_requests % 20, 32 + 37 * self.num_requests % 64
                self.world.add(f"r{self.num_requests}", [(start + i) % 20 for i in range(24)], max_tokens=length)
                self.num_requests += 1
            self.world.step()
        return (self.count() - tokens) / (self.seconds - seconds)

    def count(self) -> int:
        return sum(map(len, self.world.tokens.values()))


def ratio(machine: Machine, regularity: float, num_rows: int, num_steps: int, seed: int = 0) -> float:
    """The speed with drafts over that without."""
    plain, drafted = (Trial(machine, regularity, speculate, seed) for speculate in ("off", "auto"))
    return drafted.speed(num_rows, num_steps) / plain.speed(num_rows, num_steps)
