"""Slots are cheap to load, grow by themselves, and are copied beside the computation where there is a copy to make."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import InternalError
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta, SlotColumns, in_arena
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraTokens
from tests.model.tiny import CPU, MODULE, filled_slots, random_adapter

SHAPE = LinearShape(24, 40)
LINEARS = {MODULE: SHAPE, "other": SHAPE}


class FakeStream:
    """Notes what happens in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_copies = 0

    @contextmanager
    def copying(self) -> Iterator[str]:
        self.num_copies += 1
        self.log.append(f"copy {self.num_copies} begins")
        yield f"event {self.num_copies}"
        self.log.append(f"event {self.num_copies} is set")

    def wait(self, event: object) -> None:
        self.log.append(f"wait for {event}")


def with_columns(adapter: HostAdapter) -> HostAdapter:
    columns = SlotColumns.of([adapter.deltas.get(path) for path in LINEARS])
    return HostAdapter(adapter.digest, adapter.rank, adapter.deltas, columns=columns)


def product(slots: LoraSlots, kernel: str, rows: list[int], x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(len(x), SHAPE.out_features)
    create_kernel(kernel, slots).add(
        y, x, (slots.module_index[MODULE],), LoraTokens.of((1, slot, 1.0) for slot in rows)
    )
    return y


@pytest.mark.parametrize("kernel", ["loop", "native"])
@pytest.mark.parametrize("rank", [7, 8])
def test_columns_made_beforehand_give_what_the_slot_would_have_made(kernel: str, rank: int) -> None:
    adapter, x = random_adapter("d", rank, SHAPE, torch.bfloat16), torch.randn(2, 24)
    results = []
    for one in (adapter, with_columns(adapter)):
        slots = LoraSlots(LINEARS, 2, CPU)
        slots.load(SlotRef(1, 1, "d"), one)
        results.append(product(slots, kernel, [1, 1], x))
    assert torch.equal(*results)
    assert results[0].any()


def test_slot_of_columns_refers_to_the_host_tensors_and_forgets_them_when_it_is_cleared() -> None:
    adapter, slots = with_columns(random_adapter("d", 8, SHAPE)), LoraSlots(LINEARS, 2, CPU)
    slots.load(SlotRef(1, 1, "d"), adapter)
    module = slots.module_index[MODULE]
    assert slots.delta(module, 1) is adapter.deltas[MODULE]
    assert slots.delta(slots.module_index["other"], 1) is None
    assert slots.tables.a[module, 1] == adapter.deltas[MODULE].a.data_ptr()  # type: ignore[union-attr]
    slots.clear(1)
    assert slots.delta(module, 1) is None
    assert not slots.tables.a.any()


@pytest.mark.parametrize("is_copied", [False, True])
def test_adapter_with_columns_of_210_modules_is_in_its_slot_well_within_a_millisecond(is_copied: bool) -> None:
    linears = {f"layer{i}": SHAPE for i in range(210)}
    deltas = {path: LinearDelta(torch.randn(4, 24), torch.randn(4, 40), 1.0) for path in linears}
    adapter = in_arena(HostAdapter("d", 4, deltas), linears, pin=False)
    slots = LoraSlots(linears, 8, CPU, FakeStream() if is_copied else None)
    slots.device_records()

    def seconds(generation: int) -> float:
        start = time.perf_counter()
        slots.load(SlotRef(3, generation, "d"), adapter)
        return time.perf_counter() - start

    assert min(seconds(generation) for generation in range(20)) < 1e-3


@pytest.mark.parametrize("kernel", ["loop", "native"])
def test_a_slot_beyond_the_tables_makes_room_and_the_others_give_what_they_gave(kernel: str) -> None:
    torch.manual_seed(0)
    slots, x = filled_slots(SHAPE, (3, 4)), torch.randn(3, 24)
    serving = create_kernel(kernel, slots)  # made before the growth, used after it
    module, rows = slots.module_index[MODULE], LoraTokens.of([(1, 0, 1.0), (1, 1, 1.0), (1, -1, 1.0)])
    before = torch.zeros(3, 40)
    serving.add(before, x, (module,), rows)
    old_tables = slots.tables
    slots.load(SlotRef(9, 1, "new"), random_adapter("new", 5, SHAPE))
    assert slots.tables.num_slots >= 10
    for table in (old_tables.a, old_tables.b, old_tables.rank):
        table.zero_()  # whoever still follows the old tables finds nothing there
    after = torch.zeros(3, 40)
    serving.add(after, x, (module,), rows)
    assert torch.equal(after, before)
    own = torch.zeros(3, 40)
    serving.add(own, x, (module,), LoraTokens.of([(1, 9, 1.0)] * 3))
    delta = slots.delta(module, 9)
    assert delta is not None
    assert torch.allclose(own, 0.5 * x @ delta.a.t() @ delta.b, atol=1e-4)  # type: ignore[union-attr]


def test_growth_is_geometric() -> None:
    slots, widths = LoraSlots(LINEARS, 2, CPU), set()
    for index in range(40):
        slots.load(SlotRef(index, 1, "d"), random_adapter("d", 3, SHAPE))
        widths.add(slots.tables.num_slots)
    assert widths == {2, 4, 8, 16, 32, 64}


def test_slot_that_was_never_there_is_refused_and_can_be_cleared() -> None:
    slots = LoraSlots(LINEARS, 2, CPU)
    slots.clear(50)
    with pytest.raises(InternalError, match="slot 50 no longer holds"):
        slots.check(SlotRef(50, 1, "d"))


@pytest.mark.parametrize("kernel", ["loop", "native"])
@pytest.mark.parametrize("rank", [7, 8])
def test_copied_arena_gives_what_the_host_tensors_give(kernel: str, rank: int) -> None:
    adapter, x = random_adapter("d", rank, SHAPE, torch.bfloat16), torch.randn(2, 24)
    plain = LoraSlots(LINEARS, 2, CPU)
    plain.load(SlotRef(1, 1, "d"), adapter)
    wanted = product(plain, kernel, [1, 1], x)
    host = in_arena(adapter, LINEARS, pin=False)
    copied = LoraSlots(LINEARS, 2, CPU, FakeStream())
    copied.load(SlotRef(1, 1, "d"), host)
    assert host.arena is not None
    host.arena.zero_()  # the copy is the slot's own
    copied.check(SlotRef(1, 1, "d"))
    assert torch.equal(product(copied, kernel, [1, 1], x), wanted)


def test_arena_holds_every_tensor_once_and_its_columns_point_into_it() -> None:
    adapter = in_arena(random_adapter("d", 8, SHAPE), LINEARS, pin=False)
    assert adapter.arena is not None
    assert adapter.columns is not None
    first, last = adapter.arena.data_ptr(), adapter.arena.data_ptr() + adapter.arena.nbytes
    delta = adapter.deltas[MODULE]
    tensors = [t for t in (delta.a, delta.b, delta.gain, delta.shift) if t is not None]
    assert len(tensors) == 4
    assert all(first <= t.data_ptr() and t.data_ptr() + t.nbytes <= last for t in tensors)
    assert adapter.columns.tables.b[0] == delta.b.data_ptr()  # type: ignore[union-attr]


def test_computation_waits_for_a_copy_once_and_only_for_the_slot_that_a_row_uses() -> None:
    stream = FakeStream()
    slots = LoraSlots(LINEARS, 4, CPU, stream)
    first, second = SlotRef(0, 1, "a"), SlotRef(1, 1, "b")
    for slot in (first, second):
        slots.load(slot, in_arena(random_adapter(slot.digest, 4, SHAPE), LINEARS, pin=False))
    begun = ["copy 1 begins", "event 1 is set", "copy 2 begins", "event 2 is set"]
    assert stream.log == begun
    slots.check(second)
    slots.check(second)
    assert stream.log == [*begun, "wait for event 2"]
    slots.clear(0)
    slots.load(SlotRef(0, 2, "a"), in_arena(random_adapter("a", 4, SHAPE), LINEARS, pin=False))
    slots.check(SlotRef(0, 2, "a"))
    assert stream.log[-1] == "wait for event 3"  # not for the copy that was cleared


def test_refused_slot_waits_for_nothing() -> None:
    stream = FakeStream()
    slots = LoraSlots(LINEARS, 2, CPU, stream)
    slots.load(SlotRef(0, 2, "a"), random_adapter("a", 4, SHAPE))
    with pytest.raises(InternalError):
        slots.check(SlotRef(0, 1, "a"))
    assert not any(line.startswith("wait") for line in stream.log)


def test_records_on_the_device_follow_the_slots_in_place() -> None:
    slots = filled_slots(SHAPE, (3, 4))
    records, module = slots.device_records(), slots.module_index[MODULE]
    memory = records.tensor
    a, b, gain, shift, rank, scale, is_bfloat16, _ = memory[1, module].tolist()
    delta = slots.delta(module, 1)
    assert delta is not None
    pointers = [0 if t is None else t.data_ptr() for t in (delta.a, delta.b, delta.gain, delta.shift)]
    assert [a, b, gain, shift, rank, is_bfloat16] == [*pointers, 4, 0]
    assert torch.tensor(scale).to(torch.int32).view(torch.float32).item() == delta.scale
    assert not memory[1, slots.module_index["other"]].any()
    slots.load(SlotRef(1, 2, "new"), random_adapter("new", 7, SHAPE, torch.bfloat16))
    assert memory[1, module, 4:7].tolist()[::2] == [7, 1]
    slots.clear(1)
    assert not memory[1].any()
    assert records.tensor is memory
    kept = memory[0].clone()
    slots.load(SlotRef(5, 1, "far"), random_adapter("far", 3, SHAPE))
    assert records.tensor is not memory
    assert torch.equal(records.tensor[0], kept)


def test_records_are_moved_after_the_copies_that_write_into_them() -> None:
    stream = FakeStream()
    slots = LoraSlots(LINEARS, 1, CPU, stream)
    slots.device_records()
    slots.load(SlotRef(0, 1, "a"), random_adapter("a", 4, SHAPE))
    slots.load(SlotRef(3, 1, "b"), random_adapter("b", 4, SHAPE))
    assert stream.log[2:4] == ["wait for event 1", "copy 2 begins"]


def test_largest_rank_is_kept_as_a_power_of_two_and_changes_of_modules_are_known() -> None:
    slots = filled_slots(SHAPE, (3,))
    assert slots.max_rank == 4
    slots.load(SlotRef(0, 2, "d"), random_adapter("d", 33, SHAPE))
    slots.clear(0)
    assert slots.max_rank == 64
    changed = HostAdapter("c", 0, {}, vocab_size=7)
    slots.load(SlotRef(0, 3, "c"), changed)
    assert slots.has_changes(0)
    slots.clear(0)
    assert not slots.has_changes(0)
