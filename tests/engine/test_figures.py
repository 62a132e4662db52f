"""The engine's figures: what happened since it started, and what is there now."""

from __future__ import annotations

import pytest

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.errors import LoadHangsError
from lora_serve.core.stats import ReplicaReport, report_of
from tests.engine.fake_constraints import FakeConstraints, grammar
from tests.engine.world import EOS, VirtualClock, World, adapter


def test_new_engine_has_done_nothing_yet() -> None:
    stats = World(speculate="auto").engine.stats()
    assert (stats.num_steps, stats.step_seconds, stats.num_step_tokens, stats.num_hung_loads) == (0, 0.0, 0, 0)
    assert (stats.num_preemptions, stats.num_constrained, stats.num_forced) == (0, 0, 0)
    speculation = stats.speculation
    assert (
        speculation.num_drafts,
        speculation.num_drafted,
        speculation.num_accepted,
        sum(speculation.accepted_by_place),
    ) == (0, 0, 0, 0)


def test_seconds_of_steps_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    world = World(clock=clock)
    plain = world.runner.run

    def slow(batch: Batch) -> list[RowOutput]:
        clock.now += 0.5
        return plain(batch)

    monkeypatch.setattr(world.runner, "run", slow)
    world.add("r", [1, 2, 3], max_tokens=4)
    world.run()
    stats = world.engine.stats()
    assert stats.num_steps == 4
    assert stats.step_seconds == pytest.approx(2.0)


def test_warm_up_is_in_no_figure_of_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.engine.recorder.watched(world.engine._clock())
    world.add("w0", [1, 2, 3], tenant="warm-up: 1 x 3 tokens, base")
    world.run()
    before = world.engine.stats()
    assert (before.num_steps, before.num_step_tokens, sum(before.steps_by_tokens), before.step_seconds) == (0, 0, 0, 0)
    assert (before.num_prefix_queries, before.num_prefix_hits, before.recent_batches) == (0, 0, ())
    assert world.engine.recorder.notes(0)[0] == ()
    world.add("w1", [1, 2, 3], tenant="warm-up: text")
    world.add("r", [1, 2], tenant="warm-up", max_tokens=5)
    world.run()
    stats = world.engine.stats()
    assert stats.num_steps == len(stats.recent_batches) == len(world.engine.recorder.notes(0)[0]) == 5
    assert stats.num_prefix_queries == 2


def test_loads_that_hang_are_counted_and_others_are_not() -> None:
    world = World(auto_load=False)
    for name, error in (("a", LoadHangsError("the store hangs", 1)), ("b", None)):
        world.add(name, [1], adapter(name))
        world.step()
        world.finish_load(adapter(name), error)
    assert world.engine.stats().num_hung_loads == 1


def test_running_rows_that_obey_a_grammar_are_counted() -> None:
    world = World(constraints=FakeConstraints())
    world.add("obeys", [1], grammar=grammar(range(100, 300), range(100, 300), [EOS]), max_tokens=9)
    for name in ("free", "free too"):
        world.add(name, [1], max_tokens=9)
    world.step()
    assert world.engine.stats().num_running == 3
    assert world.engine.stats().num_constrained == 1


def report(world: World) -> ReplicaReport:
    return report_of("a", 1.0, world.engine.stats())


def test_prompts_wait_until_they_are_computed_and_rows_are_read_until_they_end() -> None:
    world = World(max_num_seqs=1)
    world.add("first", list(range(40)), max_tokens=2)
    world.add("second", list(range(10)), max_tokens=2)
    assert (report(world).num_waiting, report(world).waiting_tokens, report(world).running_tokens) == (2, 50, 0)
    world.step()  # 32 tokens a step
    assert (report(world).num_running, report(world).waiting_tokens, report(world).running_tokens) == (1, 18, 32)
    world.step()
    assert (report(world).waiting_tokens, report(world).running_tokens) == (10, 40)
    world.run()
    assert (report(world).num_running, report(world).waiting_tokens, report(world).running_tokens) == (0, 0, 0)


def test_adapters_are_told_by_where_they_are() -> None:
    world = World(auto_load=False, max_loras=1)
    world.add("1", [1, 2, 3], adapter("x"))
    world.step()
    assert (report(world).loading, report(world).host, report(world).device) == (("sha256:x",), (), ())
    world.finish_load(adapter("x"))
    world.step()
    assert (report(world).loading, report(world).host, report(world).device) == ((), ("sha256:x",), ("sha256:x",))
    assert (report(world).max_loras, report(world).num_blocks - report(world).num_free_blocks) == (1, 1)
