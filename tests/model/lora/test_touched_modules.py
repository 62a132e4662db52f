"""LoRA is launched for modules that an adapter of the step touches; in a captured step, for those it was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, SlotRef
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots
from tests.contracts.test_lora_kernel import filled_group, tokens_of
from tests.model.fusion.test_joined_linears import CountedPrograms
from tests.model.recorded_call import RecordedCall
from tests.model.runner.test_step_graphs import World, decode
from tests.model.tiny import CPU

SIZES = (40, 7, 21)  # of layers 1, 2 and 3: slot 0 adapts all of them, slot 1 the last, slot 2 the first
LINEARS = {f"layers.{i}.{name}": LinearShape(8, 8) for i in range(2) for name in ("q_proj", "v_proj", "down_proj")}


def test_group_that_no_adapter_of_the_step_touches_is_left_alone() -> None:
    torch.manual_seed(0)
    slots = filled_group(SIZES, torch.bfloat16)
    kernel: Any = create_kernel("triton", slots)
    programs = kernel._programs = CountedPrograms(kernel._programs)
    x, y, group = torch.randn(70, 85), torch.randn(70, 47), (1, 2)

    def launches(*rows: tuple[float, ...]) -> int:
        programs.num_launches = 0
        num_tokens, found = int(sum(row[0] for row in rows)), y.clone()
        kernel.add(found[:num_tokens], x[:num_tokens], group, tokens_of(list(rows)))
        assert torch.equal(found, y) == (not programs.num_launches)
        return int(programs.num_launches)

    assert launches((1, 1), (3, 1)) == 0
    assert launches((1, 1), (1, 2)) == 2
    assert launches((66, 0)) == 4, "both types' programs are compiled when a group first has tiles"
    assert launches((66, 2)) == 2
    assert launches((66, 1)) == 0
    assert launches((1, 2), (66, 1)) == 2
    slots.load(SlotRef(1, 2, "d"), filled_adapter(slots))
    assert launches((66, 1)) == 2, "a slot's new owner is known at once"
    slots.clear(1)
    assert launches((66, 1)) == 0


def filled_adapter(slots: LoraSlots) -> HostAdapter:
    """One that adapts the first layer."""
    delta = slots.delta(slots.module_index["0"], 0)
    assert delta is not None
    return HostAdapter("d", delta.rank, {"0": delta})


@pytest.mark.parametrize(
    ("targets", "expected"), [((), 0b111111), (("q_proj",), 0b001001), (("1.v_proj", "proj"), 0b010000)]
)
def test_captured_steps_are_first_made_for_the_modules_that_are_named(targets: tuple[str, ...], expected: int) -> None:
    slots = LoraSlots(LINEARS, 2, CPU, targets=targets)
    assert slots.expected == expected
    assert slots.expect(frozenset()) == 0
    assert slots.expected == expected


def test_graph_launches_for_what_adapters_touch_and_serves_all_that_touch_no_more(tmp_path: Path) -> None:
    world = World(
        tmp_path, ("q_proj", "down_proj"), num_hidden_layers=1,
        settings={"lora_target_modules": ("q_proj",)},
    )  # fmt: skip
    narrow, a = world.load("narrow", 0, 1), world.load("a", 1, 1)
    table = world.prompt(0, 4)
    rows = [decode(0, 4, table, 9, narrow)]
    world.agree(rows)
    first = world.captured.run(Batch(tuple(rows), ()))
    assert launches_of(world.recorders) == [2], "queries, keys and values are one group"
    world.agree([decode(0, 4, table, 9, a)])
    assert launches_of(world.recorders) == [2, 4]
    world.agree(rows)
    assert world.captured.run(Batch(tuple(rows), ())) == first, "the same bits, whatever else is launched"
    world.agree([decode(0, 4, table, 7, world.load("b", 0, 2))])
    assert launches_of(world.recorders) == [2, 4], "one capture serves all of them from then on"


def launches_of(recorders: list[RecordedCall]) -> list[int]:
    """Of Triton programs, by graph."""
    return [sum(before is None for _, before in recorder._steps) for recorder in recorders]
