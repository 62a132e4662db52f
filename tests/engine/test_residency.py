"""Adapters on the device and in host memory: more of them than places, and no wrong answer."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import AdapterUnavailableError, ConflictError, DeviceMemoryError
from lora_serve.core.figures import LoadTimes
from lora_serve.core.messages import Evict, FinishEvent, Pin, Prefetch, Unpin
from lora_serve.engine import counters
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.slots import SlotTable
from tests.engine.world import World, adapter


def test_two_hundred_adapters_share_four_slots_under_zipf_traffic() -> None:
    world = World(num_blocks=400, max_num_seqs=8, max_loras=4, adapter_host_memory=300)
    generator = random.Random(1)
    weights = [1 / (rank + 1) ** 1.1 for rank in range(200)]
    for index in range(400):
        name = f"t{generator.choices(range(200), weights)[0]}"
        world.add(f"r{index}", [index % 500, 3], adapter(name), max_tokens=generator.randint(1, 6))
        if index % 3 == 0:
            world.step()
    world.run()
    world.check_answers()
    assert len(world.ends) == 400
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    world.check_nothing_held()


def test_rare_adapter_is_not_starved_by_a_stream_of_popular_ones() -> None:
    world = World(max_num_seqs=4, max_loras=1)
    world.add("popular-0", [0], adapter("popular"), max_tokens=6)
    world.step()
    world.add("rare", [1], adapter("rare"), max_tokens=2)
    for index in range(1, 300):
        world.add(f"popular-{index}", [index % 500], adapter("popular"), max_tokens=6)
        world.step()
        if "rare" in world.ends:
            break
    assert "rare" in world.ends, "younger rows of the resident adapter kept the only slot for ever"
    world.run()
    world.check_answers()


def test_one_load_serves_many_waiting_requests() -> None:
    world = World(auto_load=False)
    for index in range(5):
        world.add(f"r{index}", [index], adapter("a"))
    world.step()
    world.step()
    assert world.loading == [adapter("a")]


def test_failed_load_ends_its_waiters_and_nobody_else() -> None:
    world = World(auto_load=False)
    world.add("a1", [1], adapter("a"))
    world.add("a2", [1], adapter("a"))
    world.add("b", [1], adapter("b"))
    world.step()
    world.finish_load(adapter("a"), AdapterUnavailableError("the disk is gone"))
    world.finish_load(adapter("b"))
    world.run()
    assert str(world.error("a1")) == str(world.error("a2")) == "the disk is gone"
    assert isinstance(world.ends["b"], FinishEvent)
    world.check_nothing_held()


def test_slot_in_use_is_never_given_away() -> None:
    table = SlotTable(1)
    placed = table.place(adapter("a"))
    assert placed is not None
    held = table.acquire("sha256:a")
    assert table.place(adapter("b")) is None
    table.release(held)
    replaced = table.place(adapter("b"))
    assert replaced is not None
    slot, evicted = replaced
    assert evicted == (held,)
    assert slot == SlotRef(1, 2, "sha256:b"), "a new owner of a slot has a new generation"


def test_least_recently_used_slot_goes_first_and_only_as_many_as_needed() -> None:
    table = SlotTable(3, max_bytes=30)
    for name in "abc":
        table.place(adapter(name))
    table.use("sha256:a")
    placed = table.place(adapter("big", num_bytes=20))
    assert placed is not None
    assert [slot.digest for slot in placed[1]] == ["sha256:b", "sha256:c"]
    assert "sha256:a" in table


def test_pinned_adapter_stays_under_churn_and_goes_after_unpin() -> None:
    world = World(max_loras=2)
    replies = world.command(Pin(adapter("pinned")))
    world.step()
    assert replies == [None]
    for index in range(6):
        world.add(f"r{index}", [index], adapter(f"x{index}"))
        world.run()
        assert "sha256:pinned" in world.residency.slots
    assert world.command(Unpin("sha256:pinned")) == [None]
    for index in range(2):
        world.add(f"s{index}", [index], adapter(f"y{index}"))
    world.run()
    assert "sha256:pinned" not in world.residency.slots


def test_when_every_slot_is_pinned_others_are_refused_with_words() -> None:
    world = World(max_loras=1)
    world.command(Pin(adapter("pinned")))
    world.step()
    world.add("other", [1], adapter("other"))
    world.run()
    assert "unpin" in str(world.error("other"))
    world.check_nothing_held()


def test_adapter_larger_than_device_memory_is_refused_with_words() -> None:
    world = World(adapter_memory=5)
    world.add("big", [1], adapter("big"))
    world.run()
    assert "--adapter-memory" in str(world.error("big"))


def test_evict_waits_for_running_rows_then_frees_both_tiers() -> None:
    world = World()
    world.add("r", [1], adapter("a"), max_tokens=4)
    world.step()
    replies = world.command(Evict("sha256:a"))
    world.step()
    assert replies == []
    world.run()
    assert replies == [None]
    assert "sha256:a" not in world.residency.slots
    assert "sha256:a" not in world.residency.host
    assert world.runner.slots == {}
    world.check_answers()


def test_figures_of_a_deleted_adapter_are_forgotten_and_of_an_evicted_one_kept() -> None:
    world = World()
    for name in ("kept", "deleted"):
        world.add(name, [1], adapter(name))
    world.run()
    world.command(Evict("sha256:kept"))
    world.command(Evict("sha256:deleted", forget=True))
    counters = world.engine.stats().adapters
    assert set(counters) == {"sha256:kept"}
    assert counters["sha256:kept"].evictions == 1


def test_prefetch_brings_it_onto_the_device_before_anybody_asks() -> None:
    world = World(auto_load=False)
    replies = world.command(Prefetch(adapter("a")))
    assert world.loading == [adapter("a")]
    world.finish_load(adapter("a"))
    world.step()
    assert replies == [None]
    assert [digest for _, digest in world.runner.slots.values()] == ["sha256:a"]


def test_prefetch_of_what_is_there_already_is_a_use_of_it() -> None:
    world = World(max_loras=2)
    for name in ("a", "b"):
        world.add(name, [1], adapter(name))
    world.run()
    for name in ("a", "c"):
        world.command(Prefetch(adapter(name)))
        world.step()
    assert {digest for _, digest in world.runner.slots.values()} == {"sha256:a", "sha256:c"}


def test_prefetch_of_what_cannot_be_loaded_says_why() -> None:
    world = World(auto_load=False)
    replies = world.command(Pin(adapter("a")))
    world.finish_load(adapter("a"), AdapterUnavailableError("no such blob"))
    assert [str(reply) for reply in replies] == ["no such blob"]


def test_command_that_wants_it_in_a_slot_is_answered_once_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(auto_load=False)
    load, told = world.runner.load_slot, list[int]()

    def load_slot(slot: SlotRef, value: str) -> None:
        told.append(len(world.engine.commands._replies))
        if len(told) == 1:
            raise DeviceMemoryError("no room")
        load(slot, value)

    monkeypatch.setattr(world.runner, "load_slot", load_slot)
    replies = world.command(Pin(adapter("a")))
    world.finish_load(adapter("a"))
    world.step()
    assert [type(reply) for reply in replies] == [AdapterUnavailableError]
    assert "sha256:a" not in world.residency.slots
    replies = world.command(Pin(adapter("a")))
    assert (replies, told) == ([None], [0, 0])
    assert world.residency.slots.is_pinned("sha256:a")


def test_host_memory_for_one_adapter_only_still_serves_them_all() -> None:
    world = World(max_loras=2, adapter_host_memory=10, max_num_seqs=4)
    for index in range(12):
        world.add(f"r{index}", [index], adapter(f"a{index % 5}"))
    world.run()
    world.check_answers()
    assert len(world.ends) == 12
    assert world.engine.stats().tiers["host"].loads <= 12, "what was loaded was evicted before it was used"
    world.check_nothing_held()


@pytest.mark.parametrize("popularity", ["distinct", "identical", "uniform", "skewed"])
def test_counters_add_up(popularity: str) -> None:
    world = World(max_loras=3)
    generator = random.Random(0)
    names = {
        "distinct": [f"a{i}" for i in range(20)],
        "identical": ["a"] * 20,
        "uniform": [f"a{i % 4}" for i in range(20)],
        "skewed": [f"a{min(int(generator.expovariate(1)), 6)}" for _ in range(20)],
    }[popularity]
    for index, name in enumerate(names):
        world.add(f"r{index}", [index], adapter(name))
        world.run()
    stats = world.engine.stats()
    assert stats.tiers["device"].hits + stats.tiers["device"].misses == 20
    assert sum(sum((*item.hits.values(), *item.misses.values())) for item in stats.adapters.values()) == 20
    assert stats.tiers["host"].loads == len(set(names))
    world.check_answers()


def test_warm_up_is_no_traffic_of_adapters() -> None:
    """Before anybody's request the console showed 94 % hits on the device."""
    world = World(max_loras=1)
    warm_up = dataclasses.replace(adapter("w"), digest="warm-up")
    for number, ref in enumerate((warm_up, warm_up, adapter("a"), warm_up, adapter("b"))):
        world.add(f"r{number}", [number], ref)
        world.run()
    world.engine.residency.evict(warm_up.digest, forget=True)
    stats = world.engine.stats()
    assert set(stats.adapters) == {adapter("a").digest, adapter("b").digest}
    device, host = stats.tiers["device"], stats.tiers["host"]
    assert (device.hits, device.misses, device.loads, device.evictions) == (0, 2, 2, 1)
    assert (host.hits, host.misses, host.loads, host.evictions) == (0, 2, 2, 0)


def test_ids_of_one_content_have_hits_and_misses_of_their_own_and_few_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters, "_MAX_NAMES", 3)
    world = World()
    for number, name in enumerate(("a", "b", "b", "a")):
        world.add(f"r{number}", [number], dataclasses.replace(adapter("a"), name=name))
        world.run()
    found = world.engine.stats().adapters[adapter("a").digest]
    assert (found.hits, found.misses) == ({"a": 1, "b": 2}, {"a": 1})
    for number in range(4):
        world.add(f"s{number}", [number], dataclasses.replace(adapter("a"), name=f"a{number}"))
        world.run()
    assert world.engine.stats().adapters[adapter("a").digest].hits == {"a1": 1, "a2": 1, "a3": 1}


def test_split_of_the_last_load_is_kept_with_the_copy_into_the_slot() -> None:
    world = World(auto_load=False)
    world.add("r", [1], adapter("a"))
    world.step()
    digest = world.loading.pop().digest
    times = LoadTimes("disk", 0.1, 0.2, 0.3, 0.4)
    world.take(world.engine.load_finished(LoadFinished(digest, digest, None, 1.0, times)))
    assert world.engine.stats().adapters[digest].last_load == times
    world.run()
    found = world.engine.stats().adapters[digest].last_load
    assert found is not None
    assert found.copy > 0
    assert dataclasses.replace(found, copy=0.0) == times


def test_host_memory_counts_what_a_load_says_that_it_takes() -> None:
    world = World(auto_load=False, adapter_host_memory=40)
    padded, other, third = adapter("padded"), adapter("other"), adapter("third")
    assert world.residency.request(padded)
    message = LoadFinished(padded.digest, padded.digest, None, 1.0, extra_bytes=22)
    assert world.residency.load_finished(message) is None
    assert world.engine.stats().tiers["host"].num_bytes == 32
    assert world.residency.evict(padded.digest)
    for ref in (other, third):
        world.residency.want(ref)
        assert world.residency.request(ref)
    assert not world.residency.request(padded), "its 10 bytes would fit, its 32 do not"


def test_engine_is_busy_while_sequences_run() -> None:
    world = World()
    assert not world.engine.is_busy
    world.add("r", [1], max_tokens=3)
    assert not world.engine.is_busy
    world.step()
    assert world.engine.is_busy
    world.run()
    assert not world.engine.is_busy


def test_pin_that_waits_for_its_load_is_withdrawn_by_the_unpin_that_follows() -> None:
    world = World(auto_load=False)
    pinned = world.command(Pin(adapter("a")))
    assert world.command(Unpin("sha256:a")) == [None]
    assert isinstance(pinned[0], ConflictError)
    world.finish_load(adapter("a"))
    world.run()
    assert not world.residency.slots.is_pinned("sha256:a")


def test_adapter_that_is_there_or_on_its_way_is_not_loaded_again() -> None:
    world = World(auto_load=False)
    residency, ref = world.residency, adapter("a")
    assert [residency.fetched(ref) for _ in range(3)] == [None] * 3
    assert world.loading == [ref]
    world.finish_load(ref)
    assert residency.fetched(ref) is not None
    assert world.loading == []


def test_adapters_of_the_first_in_the_queue_leave_host_memory_last() -> None:
    world = World(auto_load=False, adapter_host_memory=20)
    first, wanted, newcomer = adapter("first"), adapter("wanted"), adapter("newcomer")
    world.residency.protect([first])
    for ref in (first, wanted):
        world.residency.want(ref)
        assert world.residency.request(ref)
        world.finish_load(ref)
    world.residency.protect([first, newcomer])
    assert world.residency.request(newcomer), "what comes first is loaded, whether there is room or not"
    world.finish_load(newcomer)
    assert world.residency.is_here("sha256:first")
    assert world.residency.is_here("sha256:newcomer")
    assert not world.residency.is_here("sha256:wanted")
