"""A look at the engine shows what is there; what it did is noted only while somebody looks."""

from __future__ import annotations

from typing import Any

import pytest

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.live import EngineView
from lora_serve.core.messages import Evict, Tune, Watch
from lora_serve.core.model_spec import PoolingSpec
from lora_serve.core.request import PoolingParams, Task
from lora_serve.engine.figures import MAX_WAITING
from lora_serve.engine.recorder import MAX_NOTES, WATCHED_SECONDS
from tests.engine.fake_constraints import FakeConstraints, grammar
from tests.engine.world import VirtualClock, World, adapter


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def watched_world(clock: VirtualClock, **options: Any) -> World:
    world = World(clock=clock, **options)
    look(world)
    return world


def look(world: World, since: int = 0, *tenants: str, in_full: bool = False) -> EngineView:
    return world.engine.view(Watch(1, since, tenants, in_full))


def states(found: EngineView) -> dict[str, str]:
    return {request.id: request.state for request in found.requests}


def test_nothing_is_noted_while_nobody_looks(clock: VirtualClock) -> None:
    world = World(clock=clock)
    world.add("r", [1, 2, 3], adapter("a"))
    world.run()
    found = look(world)
    assert (found.steps, found.ended, found.moves, found.mark) == ((), (), (), 0)


def test_it_is_noted_for_some_seconds_after_a_look(clock: VirtualClock) -> None:
    world = watched_world(clock)
    clock.now += WATCHED_SECONDS
    world.add("r", [1, 2, 3])
    world.step()
    assert world.engine.recorder.is_on
    clock.now += 0.1
    world.step()
    assert not world.engine.recorder.is_on
    world.run()
    found = look(world)
    assert (found.steps, found.ended) == ((), ()), "notes of then are old by now"


def test_steps_that_take_longer_than_that_are_noted(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    world = watched_world(clock)
    plain = world.runner.run

    def slow(batch: Batch) -> list[RowOutput]:
        clock.now += 2 * WATCHED_SECONDS
        return plain(batch)

    monkeypatch.setattr(world.runner, "run", slow)
    world.add("r", [1, 2], max_tokens=3)
    seen = []
    while world.step():
        seen += [step.ms for step in look(world).steps[-1:]]
    assert seen == [2000 * WATCHED_SECONDS] * 3


def test_a_step_names_its_rows_with_what_they_did_and_got(clock: VirtualClock) -> None:
    world = watched_world(clock, max_num_batched_tokens=16)
    world.add("long", [1] * 20, max_tokens=2)
    world.add("short", [2, 3], max_tokens=3)
    world.run()
    steps = look(world).steps
    assert [step.rows for step in steps] == [
        (("long", "prefill", 16, 0),),
        (("long", "prefill", 4, 1), ("short", "prefill", 2, 1)),
        (("long", "decode", 1, 1), ("short", "decode", 1, 1)),
        (("short", "decode", 1, 1),),
    ]
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert world.engine.stats().num_steps == 4


def test_a_pause_before_a_step_is_marked(clock: VirtualClock) -> None:
    world = watched_world(clock)
    for pause in (0.0, 1.0, 0.001):
        clock.now += pause
        world.add(f"r{pause}", [1, 2], max_tokens=1)
        world.run()
    assert [step.is_gap for step in look(world).steps] == [False, True, False]


def test_times_are_those_of_the_wall(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(clock=clock)
    monkeypatch.setattr(world.engine.recorder, "_wall", lambda: clock.now + 5000)
    look(world)
    world.add("r", [1, 2])
    clock.now += 0.25
    world.step()
    (request,), (step,) = look(world).requests, look(world).steps
    assert (request.arrived, step.time) == (6000.0, 6000.25)
    assert request.first_token_ms == 250.0


def test_each_viewer_gets_what_it_has_not_seen(clock: VirtualClock) -> None:
    world = watched_world(clock)
    world.add("r", [1, 2], max_tokens=4)
    world.step()
    world.step()
    first = look(world)
    assert [step.number for step in first.steps] == [1, 2]
    world.step()
    assert [step.number for step in look(world, first.mark).steps] == [3]
    assert [step.number for step in look(world).steps] == [1, 2, 3], "another one, who has seen nothing"
    assert look(world, look(world).mark).steps == ()


def test_mark_of_another_engine_is_none(clock: VirtualClock) -> None:
    world = watched_world(clock)
    world.add("r", [1, 2], max_tokens=1)
    world.run()
    assert len(look(world, since=10**6).steps) == 1


def test_notes_are_bounded(clock: VirtualClock) -> None:
    world = watched_world(clock, max_model_len=2000, num_blocks=600)
    world.add("r", [1, 2], max_tokens=MAX_NOTES + 100)
    world.run()
    steps = look(world).steps
    assert [step.number for step in steps] == list(range(101, MAX_NOTES + 101))


def test_every_end_has_its_reason(clock: VirtualClock) -> None:
    world = watched_world(clock, next_token=lambda key, tokens: 9 if len(tokens) > 3 else 5)
    world.add("length", [1, 2], max_tokens=1)
    world.add("stop", [1, 2], max_tokens=50, stop_token_ids=(9,))
    world.add("late", [1, 2], max_tokens=50, deadline=clock.now + 0.5)
    world.add("left", [1, 2], max_tokens=50)
    for _ in range(4):
        world.step()
    world.scheduler.abort("left")
    clock.now += 1
    world.step()
    assert {request.id: request.reason for request in look(world).ended} == {
        "length": "length",
        "stop": "stop",
        "late": "error",
        "left": "abort",
    }
    assert {request.state for request in look(world).ended} == {"finished"}


def test_states_of_those_that_do_not_run(clock: VirtualClock) -> None:
    constraints = FakeConstraints()
    world = watched_world(clock, auto_load=False, max_num_seqs=1, constraints=constraints)
    world.add("running", [1, 2], max_tokens=50)
    world.add("waiting", [1, 2])
    world.add("loading", [1, 2], adapter("a"))
    world.add("compiling", [1, 2], grammar=grammar([1], [2]))
    world.step()
    assert states(look(world)) == {name: name for name in ("running", "waiting", "loading", "compiling")}
    assert [load.digest for load in look(world).loads] == ["sha256:a"]
    counts = look(world).queue["default"]
    assert (counts.running, counts.waiting) == (1, 3)


def test_preempted_is_a_state(clock: VirtualClock) -> None:
    world = watched_world(clock, num_blocks=8, swap_space=0)
    world.add("a", [1] * 12, max_tokens=18)
    world.add("b", [2] * 12, max_tokens=18)
    while not world.scheduler.num_preemptions:
        assert world.step()
    assert states(look(world)) == {"a": "running", "b": "preempted"}
    assert look(world).num_preemptions == 1


def test_moves_of_adapters_are_named(clock: VirtualClock) -> None:
    world = watched_world(clock, max_loras=1)
    for name in "ab":
        world.add(name, [1, 2], adapter(name), max_tokens=1)
        world.run()
    world.command(Evict("sha256:b"))
    moves = [(move.name, move.source, move.to, move.tenant) for move in look(world).moves]
    assert moves == [
        ("a", "none", "host", "default"),
        ("a", "host", "device", "default"),
        ("b", "none", "host", "default"),
        ("a", "device", "none", "default"),
        ("b", "host", "device", "default"),
        ("b", "host", "none", "default"),
        ("b", "device", "none", "default"),
    ]


def test_slots_and_blocks_are_those_of_the_figures(clock: VirtualClock) -> None:
    world = watched_world(clock)
    world.add("r", [1] * 9, adapter("a", num_bytes=70), max_tokens=20)
    while not world.scheduler.running:
        world.step()
    found, stats = look(world), world.engine.stats()
    (slot,), (info,) = found.slots, stats.slots
    assert (slot.index, slot.name, slot.digest, slot.bytes, slot.num_rows, slot.pinned) == (
        info.index, info.name, info.digest, info.num_bytes, info.num_rows, info.pinned
    )  # fmt: skip
    assert (found.num_blocks, found.num_free_blocks, found.max_loras) == (
        stats.num_blocks, stats.num_free_blocks, stats.max_loras
    )  # fmt: skip
    assert found.num_known_blocks == 2


def test_settings_come_when_they_are_asked_for(clock: VirtualClock) -> None:
    world = World(clock=clock, max_num_seqs=8)
    assert look(world).settings is None
    world.command(Tune(latency_target_ms=500.0))
    settings = look(world, in_full=True).settings
    assert settings is not None
    assert (settings.targets.first_token_ms, settings.targets.inter_token_ms, settings.max_num_seqs) == (500.0, None, 8)
    assert settings.block_size == world.engine.stats().block_size
    assert set(settings.tiers) == {"device", "host"}


def test_of_a_long_queue_the_first_are_shown_and_the_first_of_each_tenant_that_is_watched(clock: VirtualClock) -> None:
    world = watched_world(clock, max_num_seqs=1)
    for number in range(MAX_WAITING + 20):
        world.add(f"flood{number}", [1, 2], tenant="flood")
    for tenant in ("acme", "other"):
        world.add(tenant, [1, 2], tenant=tenant, priority=1)
    shown = [request.id for request in look(world).requests]
    assert shown == [f"flood{number}" for number in range(MAX_WAITING)]
    shown = [request.id for request in look(world, 0, "acme").requests]
    assert shown[MAX_WAITING:] == ["acme"]
    assert look(world).queue["flood"].waiting == MAX_WAITING + 20


def test_a_pooled_prompt_is_one_row(clock: VirtualClock) -> None:
    world = watched_world(clock, pooling=PoolingSpec(Task.EMBED, 0))
    world.add("r", [1, 2, 3], pooling=PoolingParams())
    world.run()
    assert [step.rows for step in look(world).steps] == [(("r", "pool", 3, 0),)]
    assert [request.reason for request in look(world).ended] == ["stop"]
