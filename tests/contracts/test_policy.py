"""What every scheduling policy must do, whatever the traffic: each file of the folder is under this contract."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_serve.engine.policies as package
from lora_serve.core.batch import Batch
from lora_serve.core.errors import CapacityError, RequestTimeoutError
from lora_serve.core.messages import ErrorEvent, FinishEvent
from lora_serve.core.request import AdapterUse, OnCold
from lora_serve.core.settings import Settings
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.sequence import Sequence
from tests.attempts import in_some_attempt
from tests.engine.policies.traffic import STEP, policy_of, timed_world, waiting
from tests.engine.world import World, adapter
from tests.tiers import num_examples

FOLDER = Path(str(package.__file__)).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "base"))
every_policy = pytest.mark.parametrize("name", NAMES)


def test_files_are_the_values_of_the_setting() -> None:
    assert sorted(get_args(Settings.model_fields["policy"].annotation)) == NAMES


def test_new_file_in_the_folder_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(
        "from lora_serve.engine.policies import base\n\n\n"
        "class Policy(base.Policy):\n"
        "    def key(self, sequence):\n"
        "        return (-sequence.sequence_id,)\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    try:
        policy = policy_of("toy")
        for number in (1, 2, 3):
            policy.add(waiting(number))
        assert [sequence.sequence_id for sequence in policy.order(0.0)] == [3, 2, 1]
    finally:
        sys.modules.pop("lora_serve.engine.policies.toy", None)


# -- any traffic -----------------------------------------------------------------------------------------------------


class Watched:
    """Looks at every batch before it runs; what it finds is raised by `verify`, as an engine survives a runner."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._found: list[AssertionError] = []
        self._run = world.runner.run
        world.runner.run = self.run  # type: ignore[method-assign]

    def run(self, batch: Batch) -> Any:
        try:
            self.check(batch)
        except AssertionError as error:
            self._found.append(error)
        return self._run(batch)

    def verify(self) -> None:
        for error in self._found:
            raise error

    def check(self, batch: Batch) -> None:
        self.check_budgets(batch)

    def check_budgets(self, batch: Batch) -> None:
        limits, world = self.world.settings, self.world
        assert 1 <= len(batch.rows) <= limits.max_num_seqs
        assert len(world.scheduler.running) <= limits.max_num_seqs
        assert batch.num_tokens <= limits.max_num_batched_tokens
        assert batch.num_adapters <= limits.max_loras
        assert len({row.sequence_id for row in batch.rows}) == len(batch.rows)
        assert len({block for row in batch.rows for block in row.block_table}) <= world.num_blocks
        used = {slot.digest for slot in world.residency.slots.infos() if slot.num_rows}
        assert {a.slot.digest for row in batch.rows for a in row.adapters} <= used


PROMPT = st.lists(st.integers(0, 500), min_size=1, max_size=20)
REQUEST = st.fixed_dictionaries(
    {
        "prompt": PROMPT,
        "adapters": st.lists(st.sampled_from("abcdef"), max_size=2, unique=True),
        "max_tokens": st.integers(1, 18),
        "priority": st.integers(-1, 2),
        "account": st.sampled_from(["", "acme", "globex", "initech"]),
        "seconds": st.none() | st.floats(0.05, 1.5),
        "falls_back": st.booleans(),
        "steps": st.integers(0, 3),
        "is_aborted": st.sampled_from([False, False, False, True]),
    }
)


@every_policy
@given(st.data())
def test_any_traffic_ends_once_with_right_answers_within_budgets_and_nothing_held(
    name: str, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, 5), "rows")
    world, clock = timed_world(
        name,
        num_blocks=data.draw(st.integers(12, 40), "blocks"),
        max_model_len=40,
        max_num_seqs=rows,
        max_num_batched_tokens=data.draw(st.integers(16, 40), "tokens"),
        max_loras=data.draw(st.integers(2, 3), "slots"),
        adapter_host_memory=data.draw(st.integers(20, 60), "host bytes"),
        max_wait_ms=data.draw(st.sampled_from([1, 100, 10_000]), "max wait"),
        tenant_weight="acme=3",
    )
    watched = Watched(world)
    aborted, with_deadline = set(), set()
    for index, fields in enumerate(data.draw(st.lists(REQUEST, min_size=1, max_size=16), "requests")):
        key, seconds = f"r{index}", fields["seconds"]
        with_deadline |= {key} if seconds else set()
        world.add(
            key,
            fields["prompt"],
            tuple(AdapterUse(adapter(letter), 0.5) for letter in sorted(fields["adapters"])),
            max_tokens=fields["max_tokens"],
            priority=fields["priority"],
            account=fields["account"],
            deadline=clock.now + seconds if seconds else None,
            **({"on_cold": OnCold.BASE, "fallback": ()} if fields["falls_back"] else {}),
        )
        for _ in range(fields["steps"]):
            world.step()
        if fields["is_aborted"] and key not in world.ends:
            aborted.add(key)
            world.scheduler.abort(key)
    world.run()
    watched.verify()
    world.check_answers()
    world.check_nothing_held()
    assert set(world.ends) == set(world.tokens) - aborted
    for key, end in world.ends.items():
        if isinstance(end, ErrorEvent):
            assert key in with_deadline
            assert isinstance(end.error, RequestTimeoutError | CapacityError)
        else:
            assert isinstance(end, FinishEvent)
    assert list(world.scheduler._policy.order(clock.now)) == []


# -- work conserving -------------------------------------------------------------------------------------------------


class Idle(Watched):
    """Fails where a row could have run in a batch, and did not.

    An adapter that is put on the device in this very step may be so for a row that is tried after it: then those
    before it join in the next step.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._were_there: set[str] = set()  # on the device when the batch before ran

    def check(self, batch: Batch) -> None:
        super().check(batch)
        self.check_nobody_was_left_out(batch)
        self._were_there = {slot.digest for slot in self.world.residency.slots.infos()}

    def check_nobody_was_left_out(self, batch: Batch) -> None:
        world, limits = self.world, self.world.settings
        if len(world.scheduler.running) >= limits.max_num_seqs or batch.num_tokens >= limits.max_num_batched_tokens:
            return
        slots = {slot.digest: slot for slot in world.residency.slots.infos()}
        has_slot = len(slots) < limits.max_loras or any(slot.num_rows == 0 for slot in slots.values())
        is_owed = any(self.is_owed(sequence) for sequence in world.scheduler.waiting)
        for sequence in world.scheduler.waiting:
            digests = [ref.digest for ref in sequence.refs]
            assert digests, "a row of the base model was left out"
            is_here = all(world.residency.is_here(digest) for digest in digests)
            assert not (is_here and has_slot), "a slot was left idle"
            has_long_been_there = digests[0] in slots and digests[0] in self._were_there
            assert is_owed or not has_long_been_there, "a row whose adapter is on the device was left out"

    def is_owed(self, sequence: Sequence) -> bool:
        limits = self.world.settings
        waited = self.world._clock() - sequence.waiting_since
        return sequence.num_passed_over >= limits.max_num_seqs or waited >= limits.max_wait_ms / 1000 - 1e-9


@every_policy
@settings(max_examples=num_examples() // 2)
@given(st.data())
def test_batch_is_never_smaller_than_it_could_be(name: str, data: st.DataObject) -> None:
    world, clock = timed_world(
        name,
        max_num_seqs=data.draw(st.integers(1, 6), "rows"),
        max_num_batched_tokens=data.draw(st.integers(16, 40), "tokens"),
        max_loras=data.draw(st.integers(1, 3), "slots"),
        max_wait_ms=data.draw(st.sampled_from([50, 10_000]), "max wait"),
        tenant_weight="acme=3",
    )
    watched = Idle(world)
    for index, fields in enumerate(data.draw(st.lists(REQUEST, min_size=1, max_size=16), "requests")):
        letters = fields["adapters"][:1]
        world.add(
            f"r{index}",
            fields["prompt"],
            adapter(letters[0]) if letters else None,
            max_tokens=fields["max_tokens"],
            priority=fields["priority"],
            account=fields["account"],
            deadline=clock.now + 100 + (fields["seconds"] or 0),
        )
        for _ in range(fields["steps"]):
            world.step()
    world.run()
    watched.verify()
    world.check_answers()
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())


# -- no starvation ---------------------------------------------------------------------------------------------------


@every_policy
@settings(max_examples=num_examples() // 2)
@given(st.data())
def test_nobody_starves_however_much_others_are_preferred(name: str, data: st.DataObject) -> None:
    """One of the lowest class, without a deadline, of an account of no weight, for an adapter that is not here, and a
    stream without end of all that a policy may prefer. It begins after `max_wait`, and at most the longest running row
    each for a place, a slot and its blocks, and whoever has waited longer.
    """
    rows, slots = data.draw(st.integers(1, 5), "rows"), data.draw(st.integers(1, 3), "slots")
    longest = data.draw(st.integers(1, 12), "longest")
    world, clock = timed_world(
        name, max_num_seqs=rows, max_loras=slots, max_wait_ms=500, tenant_weight="poor=0.001,rich=10"
    )
    generator, number = random.Random(data.draw(st.integers(0, 10**6), "seed")), 0

    def prefer(count: int) -> int:
        nonlocal number
        while len(world.scheduler.waiting) < count:
            ref = adapter(f"hot{generator.randrange(slots)}") if generator.random() < 0.8 else None
            world.add(
                f"hot{number}", [number % 500] * generator.randint(1, 6), ref, account="rich", priority=-1,
                max_tokens=generator.randint(1, longest), deadline=clock.now + 5,
            )  # fmt: skip
            number += 1
        return number

    for _ in range(20):
        prefer(rows + 2)
        world.step()
    world.add("poor", [1, 2, 3], adapter("tail"), account="poor", priority=9, max_tokens=3)
    arrived = clock.now
    row_seconds = (longest + 2) * STEP
    # rows + 2 may have waited longer, each takes a place for one row at most
    bound = 0.5 + (3 + (rows + 2) / rows) * row_seconds
    while "poor" not in world.prompts:
        prefer(rows + 3)
        world.step()
        assert clock.now - arrived <= bound
    world.scheduler.fail_all(CapacityError("over"))
    world.check_nothing_held()


# -- the queue -------------------------------------------------------------------------------------------------------


def any_sequence(number: int, generator: random.Random) -> Sequence:
    ref = adapter(f"a{generator.randrange(500)}") if generator.random() < 0.9 else None
    deadline = generator.choice([None, 1000 + generator.random()])
    account, priority = f"t{generator.randrange(200)}", generator.randrange(3)
    return waiting(
        number, ref, account=account, priority=priority, deadline=deadline, arrival_time=generator.random() * 20
    )


def queue_of(name: str, count: int, seed: int) -> tuple[Policy, list[Sequence], random.Random]:
    generator = random.Random(seed)
    policy = policy_of(name, is_on_device=lambda ref: ref.name < "a2", is_on_host=lambda ref: ref.name < "a4")
    sequences = [any_sequence(number, generator) for number in range(count)]
    for sequence in sequences:
        policy.add(sequence)
    return policy, sequences, generator


@every_policy
@pytest.mark.parametrize("now", [0.0, 20.0, 100.0])
def test_order_is_everybody_once_and_a_picture_of_its_moment(name: str, now: float) -> None:
    policy, sequences, _ = queue_of(name, 60, 1)
    expected = [sequence.sequence_id for sequence in policy.order(now)]
    assert sorted(expected) == list(range(60))
    assert [sequence.sequence_id for sequence in policy.order(now)] == expected, "reading it changes nothing"
    newcomer = waiting(99, account="new", arrival_time=0.0)
    seen = []
    for sequence in policy.order(now):
        seen.append(sequence.sequence_id)
        policy.remove(sequence)
        if len(seen) == 5:
            policy.add(newcomer)
    assert seen == expected
    assert list(policy.order(now)) == [newcomer]
    assert len(sequences) == 60


@every_policy
def test_what_everybody_needs_is_loaded_ahead(name: str) -> None:
    policy, sequences, _ = queue_of(name, 60, 2)
    cold = {ref.digest for sequence in sequences for ref in sequence.refs if ref.name >= "a4"}
    ahead = list(policy.prefetch_order(5.0))
    assert cold <= {ref.digest for sequence in ahead for ref in sequence.refs}
    assert len(ahead) == len({sequence.sequence_id for sequence in ahead})


@every_policy
def test_somebody_gives_way_when_memory_is_short(name: str) -> None:
    policy, sequences, _ = queue_of(name, 5, 3)
    assert policy.victim(sequences, None) in sequences
    assert policy.victim(sequences[:1], None) is sequences[0]


@every_policy
def test_three_thousand_waiting_cost_a_step_little(name: str) -> None:
    policy, _, generator = queue_of(name, 3000, 4)

    def fifty_steps() -> None:
        started = time.process_time()
        for step in range(50):
            order = policy.order(step / 10)
            for number in range(4):
                policy.remove(next(order))
                policy.add(any_sequence(10_000 + 4 * step + number, generator))
        assert time.process_time() - started < 50 * 0.02, "more than 20 ms"

    in_some_attempt(fifty_steps)
