"""A table whose slots are all in use says so without asking who should leave."""

from __future__ import annotations

from lora_serve.engine.slots import SlotTable
from tests.engine.world import adapter


def full_table() -> SlotTable:
    slots = SlotTable(2)
    for name in ("a", "b"):
        assert slots.place(adapter(name)) is not None
        slots.acquire(adapter(name).digest)
    return slots


def forbid_choosing(slots: SlotTable) -> None:
    slots._residents.victims = lambda *_: (_ for _ in ()).throw(AssertionError("nobody can leave"))


def test_whoever_finds_all_slots_in_use_or_kept_is_refused_at_once() -> None:
    slots = full_table()
    slot_of_a = slots.acquire(adapter("a").digest)
    slots.release(slot_of_a)
    forbid_choosing(slots)
    assert slots.place(adapter("c")) is None
    slots.release(slot_of_a)
    assert slots.place(adapter("c"), frozenset((adapter("a").digest,))) is None


def test_an_adapter_unpinned_or_released_can_go_again() -> None:
    slots = full_table()
    slot_of_a = next(info for info in slots.infos() if info.name == "a")
    slots.set_pinned(adapter("a").digest, True)
    slots.release(slots.acquire(adapter("a").digest))
    slots.release(slots._entries[slot_of_a.digest].slot)
    assert slots.place(adapter("c")) is None
    slots.set_pinned(adapter("a").digest, False)
    placed = slots.place(adapter("c"))
    assert placed is not None
    assert [slot.digest for slot in placed[1]] == [adapter("a").digest]


def test_deleting_a_popular_adapter_does_not_age_those_that_stay() -> None:
    slots = SlotTable(2, policy="cost")
    for name, num_uses in (("popular", 20), ("used", 3)):
        slots.place(adapter(name))
        for _ in range(num_uses):
            slots.use(adapter(name).digest)
    slots.remove(adapter("popular").digest)
    slots.place(adapter("new"))
    placed = slots.place(adapter("newer"))
    assert placed is not None
    assert [slot.digest for slot in placed[1]] == [adapter("new").digest]
