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
from tests.tiers import mostly_nightly

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
        self.world.engine.execution.runner.run = self.run  # type: ignore[method-assign]

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
        draw = hash((sequence_id, position)) % 10_007
        return (last + 1) % 20 if draw < self.regularity * 10_007 else hash((position, sequence_id)) % 1500

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


@pytest.mark.parametrize(("regularity", "num_rows", "least"), [(0.97, 1, 3.0), (0.8, 1, 1.5), (0.8, 16, 1.4)])
def test_where_guesses_are_cheap_they_pay(regularity: float, num_rows: int, least: float) -> None:
    assert ratio(reads_weights, regularity, num_rows, 400) > least


MACHINES = [(multiplies, 0.8), (in_tiles, 0.8), (either, 0.8), (multiplies, 0.97), (in_tiles, 0.97), (either, 0.97)]


@pytest.mark.parametrize(
    ("machine", "regularity"), mostly_nightly(MACHINES, (multiplies, 0.97), (in_tiles, 0.8), (either, 0.97))
)
def test_where_guesses_never_pay_they_cost_at_most_one_percent(machine: Machine, regularity: float) -> None:
    assert ratio(machine, regularity, 16, 500, seed=1) > 0.99


def test_few_rows_are_judged_apart_from_many() -> None:
    """On a machine where guesses pay for 2 rows and not for 16."""
    trial, plain = Trial(either, 0.9), Trial(either, 0.9, "off")
    for num_rows, least in ((16, 0.98), (2, 1.25), (16, 0.98), (2, 1.25)):
        assert trial.speed(num_rows, 200) > least * plain.speed(num_rows, 200)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_guesses_begin_again_when_the_text_or_the_machine_changes(num_rows: int) -> None:
    trial, plain = Trial(reads_weights, 0.0), Trial(reads_weights, 0.97, "off")
    trial.speed(num_rows, 200)
    assert trial.world.engine.stats().speculation.num_drafted < 40, "free text"
    trial.regularity = 0.97
    trial.speed(num_rows, 250)
    assert trial.speed(num_rows, 50) > 2 * plain.speed(num_rows, 50)
    trial.machine = plain.machine = in_tiles
    trial.speed(num_rows, 300)
    drafts_pay = num_rows == 1
    assert (trial.speed(num_rows, 50) > 1.5 * plain.speed(num_rows, 50)) == drafts_pay
    trial.machine = plain.machine = reads_weights
    trial.speed(num_rows, 500)
    assert trial.speed(num_rows, 50) > 2 * plain.speed(num_rows, 50)
