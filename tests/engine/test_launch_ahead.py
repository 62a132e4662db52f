"""Steps that are launched before the results of the step before are here give every request its very own tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.errors import DeviceMemoryError, InternalError
from lora_serve.core.messages import ErrorEvent, Evict, FinishEvent, Pin, SmokeTest
from lora_serve.core.model_spec import LongRope
from lora_serve.core.request import FinishReason
from tests.engine.fake_launcher import FakeLauncher
from tests.engine.fake_runner import EXPLOSION, POISON
from tests.engine.world import VirtualClock, World, adapter

REFS = [adapter(name) for name in "abcdef"]
PLAIN: dict[str, Any] = {"temperature": 0.0}


def test_a_step_is_launched_before_the_results_of_the_one_before_are_taken_in() -> None:
    launcher = FakeLauncher()
    world = World(launcher=launcher)
    world.add("x", [1, 2, 3], max_tokens=6, **PLAIN)
    assert world.step()
    assert launcher.num_launched == 1
    assert not world.tokens["x"], "nothing is known yet"
    assert world.step()
    assert (launcher.num_launched, len(world.tokens["x"])) == (2, 1)
    world.run()
    world.check_answers()
    world.check_nothing_held()
    assert (launcher.num_launched, launcher.num_behind) == (6, 5), "an end by length is known ahead"


def test_a_row_that_has_ended_runs_in_vain_once() -> None:
    launcher = FakeLauncher()
    world = World(launcher=launcher)
    plain = World()
    plain.add("x", [1, 2, 3], max_tokens=6, **PLAIN)
    plain.run()
    stop = plain.tokens["x"][2]
    world.add("x", [1, 2, 3], max_tokens=6, stop_token_ids=(stop,), **PLAIN)
    world.run()
    assert world.tokens["x"] == plain.tokens["x"][:3]
    assert isinstance(end := world.ends["x"], FinishEvent)
    assert end.reason is FinishReason.STOP
    assert launcher.num_launched == 4
    world.check_nothing_held()


def test_a_prompt_that_is_only_read_goes_on_beside_rows_that_decode() -> None:
    world = World(200, launcher=FakeLauncher(), max_num_batched_tokens=16, max_model_len=400)
    world.add("x", [1, 2, 3], max_tokens=150, **PLAIN)
    for _ in range(3):
        world.step()
    world.add("echo", list(range(60)), max_tokens=0, **PLAIN)  # of several chunks
    for _ in range(20):
        world.step()
    assert "echo" in world.ends


def test_what_has_landed_is_told_before_a_step_is_waited_for() -> None:
    world = World(launcher=FakeLauncher(refuses=lambda batch: batch.num_tokens > 8))
    world.add("x", [1, 2, 3], max_tokens=4, **PLAIN)
    for _ in range(4):
        world.step()
    run, held = world.runner.run, list[set[str]]()

    def run_and_look(batch: Batch) -> list[RowOutput]:
        held.append({event.request_id for event in world.engine._events})
        return run(batch)

    world.runner.run = run_and_look  # type: ignore[method-assign]
    world.add("y", list(range(20)), max_tokens=2, **PLAIN)
    while "y" not in world.ends:
        world.step()
    assert "x" not in held[0]


def test_the_time_of_moves_is_not_learned_as_a_launched_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = VirtualClock(), list[float]()
    world = World(launcher=FakeLauncher(), clock=clock)
    monkeypatch.setattr(world.engine.scheduler, "observe", lambda load, taken: seconds.append(taken))

    def move(moves: Any) -> float:
        clock.now += 5.0
        return 5.0

    monkeypatch.setattr(world.engine.execution, "move", move)
    world.add("x", [1, 2, 3], max_tokens=1, **PLAIN)
    world.run()
    assert seconds
    assert max(seconds) < 1.0


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_give_the_tokens_of_steps_that_are_waited_for(seed: int) -> None:
    """Ends of all kinds, aborts, preemption, slots that change hands, prompts in chunks, rows that only a host can
    draw, refused launches and rows that a graph could not draw.
    """
    generator = random.Random(seed)
    launcher = FakeLauncher(
        is_wide=lambda row: row.sample is not None and row.sample.seed == row.sample.num_output_tokens,
        refuses=lambda batch: generator.random() < 0.05,
    )
    num_blocks = 16 if seed % 3 else 60
    settings: dict[str, Any] = {"max_loras": 3, "max_num_seqs": 5, "max_num_batched_tokens": 16, "block_size": 4}
    if seed % 4 == 3:
        settings["policy"] = "priority"
    world = World(num_blocks, launcher=launcher, max_model_len=60, clock=VirtualClock(), **settings)
    names = []
    for number in range(120):
        for _ in range(generator.choice([0, 0, 0, 0, 0, 1, 2])):
            name = f"r{number}-{len(names)}"
            names.append(name)
            history = random.Random(generator.random() if generator.random() < 0.7 else 5)  # some have equal prompts
            prompt = [history.randrange(400) for _ in range(history.randrange(1, 25))]
            if generator.random() < 0.05:
                prompt[-1] = POISON
            params: dict[str, Any] = {"max_tokens": generator.randrange(1, 30), "seed": generator.randrange(100)}
            if generator.random() < 0.3:
                params["stop_token_ids"] = tuple(range(generator.randrange(100), 500, 7))
            if generator.random() < 0.1:
                params["logprobs"] = 0
            if generator.random() < 0.1:
                params["prompt_logprobs"] = 0
            ref = generator.choice([None, *REFS])
            world.add(name, prompt, ref, priority=generator.randrange(3), **params)
        if names and generator.random() < 0.1:
            world.scheduler.abort(generator.choice(names))
        if generator.random() < 0.05:
            world.command(generator.choice([Evict(REFS[0].digest), SmokeTest(REFS[1], (1, 2)), Pin(REFS[2])]))
        world.step()
    world.run()
    for name in names:
        end, expected = world.ends.get(name), world.expected(name)
        if isinstance(end, FinishEvent) and end.reason is FinishReason.STOP:
            ends = world._requests[name].sampling.stop_token_ids
            expected = expected[: next(i for i, token in enumerate(expected, 1) if token in ends)]
        if isinstance(end, FinishEvent):
            assert world.tokens[name] == expected
        else:
            assert end is None or (isinstance(end, ErrorEvent) and POISON in world._requests[name].prompt_token_ids)
            assert world.tokens[name] == expected[: len(world.tokens[name])]
    world.check_nothing_held()
    assert launcher.num_behind > 10
    if num_blocks == 16:
        assert world.scheduler.num_preemptions


def test_a_request_that_is_aborted_while_a_step_is_under_way_leaves_the_others_alone() -> None:
    world = World(launcher=FakeLauncher())
    for name in "xyz":
        world.add(name, [1, 2, 3, ord(name)], adapter("a"), max_tokens=9, **PLAIN)
    for _ in range(4):
        world.step()
    world.scheduler.abort("y")
    world.run()
    world.check_answers()
    assert world.order == ["x", "z"]
    world.check_nothing_held()


def test_steps_are_launched_ahead_while_an_adapter_is_fetched() -> None:
    launcher = FakeLauncher()
    world = World(launcher=launcher, auto_load=False)
    world.add("x", [1, 2, 3], max_tokens=40, **PLAIN)
    world.add("y", [4, 5], adapter("a"), max_tokens=2, **PLAIN)
    for _ in range(12):
        world.step()
    assert launcher.num_behind >= 9
    world.finish_load(adapter("a"))
    world.run_until("y")
    assert "x" not in world.ends
    world.run()
    world.check_answers()


def test_commands_are_done_at_once_while_nothing_is_under_way_that_reads_slots() -> None:
    """The device asserts the second."""
    launcher = FakeLauncher()
    world = World(launcher=launcher, max_loras=2)
    world.add("x", [1, 2, 3], adapter("a"), max_tokens=40, **PLAIN)
    for _ in range(4):
        world.step()
    for i in range(12):
        answer = world.command(SmokeTest(adapter("b"), (1, 2)) if i % 2 else Pin(adapter("b")))
        assert world.step()
        assert answer or i == 0, "it was not loaded yet"
        assert world.step()
    assert "x" not in world.ends
    world.run()
    world.check_answers()


def test_a_newcomer_begins_beside_rows_that_are_launched_ahead() -> None:
    world = World(launcher=FakeLauncher())
    world.add("x", [1, 2, 3], max_tokens=40, **PLAIN)
    for _ in range(4):
        world.step()
    world.add("y", [4, 5], adapter("a"), max_tokens=2, **PLAIN)
    world.run_until("y")
    assert "x" not in world.ends
    world.run()
    world.check_answers()


def test_steps_are_launched_ahead_while_a_request_waits_for_a_slot() -> None:
    launcher, clock = FakeLauncher(), VirtualClock()
    world = World(launcher=launcher, max_loras=2, clock=clock)
    for name, ref in zip("xyz", REFS, strict=False):
        world.add(name, [1, 2, ord(name)], ref, max_tokens=40, **PLAIN)
    for _ in range(20):
        world.step()
    assert launcher.num_behind >= 16
    clock.now += 1.0
    num_before = launcher.num_behind
    world.step()
    world.step()
    assert launcher.num_behind == num_before, "after a while it is tried anew"
    world.run()
    world.check_answers()
    world.check_nothing_held()


def test_a_step_for_which_memory_is_short_is_waited_for_and_the_next_is_launched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_asked = 0

    def is_short(batch: Batch) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:
            raise DeviceMemoryError("The device has no memory for this step.")
        return False

    launcher = FakeLauncher(refuses=is_short)
    world = World(launcher=launcher)
    world.add("x", [1, 2, 3], max_tokens=12, **PLAIN)
    world.run()
    world.check_answers()
    assert (launcher.num_launched, launcher.num_behind) == (12, 10)
    assert "not launched ahead" in caplog.text


def test_a_failure_ends_launching_and_only_the_row_at_fault(caplog: pytest.LogCaptureFixture) -> None:
    launcher = FakeLauncher()
    world = World(launcher=launcher)
    world.add("x", [1, 2, 3], max_tokens=12, **PLAIN)
    for _ in range(3):
        world.step()
    world.add("y", [4, EXPLOSION], max_tokens=12, **PLAIN)
    world.run()
    world.check_answers()
    assert isinstance(world.error("y"), InternalError)
    assert "from now on" in caplog.text
    assert isinstance(world.ends["x"], FinishEvent)
    world.check_nothing_held()


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_after_a_bug_nothing_stays_under_way(is_rebuilt: bool) -> None:
    world = World(launcher=FakeLauncher())
    world.add("x", [1, 2, 3], adapter("a"), max_tokens=9, **PLAIN)
    world.step()
    world.step()
    assert world.engine.execution.flights.under_way is not None
    if is_rebuilt:
        world.engine.execution.clear_slots()
    else:
        world.take(list(world.engine.fail_all(InternalError("a bug"))))
        assert isinstance(world.error("x"), InternalError)
    assert world.engine.execution.flights.under_way is None


def test_a_sequence_that_becomes_long_is_computed_anew() -> None:
    rope = LongRope(boundary=10, recomputes=True)
    launcher = FakeLauncher()
    world = World(launcher=launcher, long_rope=rope)
    world.add("x", [1, 2, 3, 4, 5], max_tokens=20, **PLAIN)
    world.run()
    world.check_answers()
    assert launcher.num_behind > 10


def test_a_token_that_the_device_cannot_draw_is_drawn_by_the_host() -> None:
    """Its row is waited for from then on, and those beside it; they are launched ahead again when it has ended."""
    launcher = FakeLauncher(is_wide=lambda row: row.sample is not None and row.sample.seed == 3)
    world = World(launcher=launcher)
    world.add("x", [1, 2, 3], max_tokens=5, seed=3)
    world.add("y", [1, 2, 3], max_tokens=15, seed=4)
    world.run()
    world.check_answers()
    assert 10 <= launcher.num_launched <= 13


def test_rows_that_a_host_has_to_draw_are_waited_for() -> None:
    launcher = FakeLauncher()
    world = World(launcher=launcher)
    world.add("x", [1, 2, 3], max_tokens=5, logprobs=1, **PLAIN)
    world.run()
    world.check_answers()
    assert launcher.num_launched == 0


def test_steps_grow_again_after_memory_was_short() -> None:
    world = World(launcher=FakeLauncher())
    world.engine.execution._memory.ran_out(8)
    world.add("x", [1, 2, 3], max_tokens=150, **PLAIN)
    world.run()
    assert world.engine.stats().memory.max_tokens is None


def test_drafts_and_launches_exclude_each_other() -> None:
    launcher = FakeLauncher()
    world = World(launcher=launcher, speculate="2")
    world.add("x", [1, 2, 1, 2, 1, 2], max_tokens=9, **PLAIN)
    world.run()
    world.check_answers()
    assert launcher.num_behind == 0
