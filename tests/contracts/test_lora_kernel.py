"""Every LoRA kernel against the formula, row by row in float64; Triton's in its interpreter (tests/conftest.py)."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from lora_serve.core.batch import BASE_SLOT, SlotRef
from lora_serve.core.errors import ConfigError
from lora_serve.core.model_spec import LinearShape
from lora_serve.core.settings import Settings
from lora_serve.model import backend_names
from lora_serve.model.lora import kernels
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta
from lora_serve.model.lora.kernels import LoraKernel, create_kernel, native, triton
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraTokens
from tests.model.tiny import CPU, MODULE, filled_slots, random_adapter
from tests.tiers import by_tier, mostly_nightly

RANKS = (1, 3, 8, 16, 33)
EMPTY = len(RANKS)  # a slot that targets nothing
POPULARITIES = {
    "distinct": [(1, slot) for slot in range(len(RANKS))],
    "identical": [(1, 2)] * 9,
    "uniform": [(1, slot % len(RANKS)) for slot in range(16)],
    "skewed": [(1, slot) for slot in (0, 0, 0, 0, 1, 0, 0, 2, 0, 4)],
    "with base rows": [(1, 1), (1, BASE_SLOT), (1, 3), (1, BASE_SLOT)],
    "prefill": [(1, 0), (1, BASE_SLOT), (7, 1), (72, 4), (5, BASE_SLOT), (65, 2)],
    "untargeted": [(1, EMPTY), (6, EMPTY), (1, 0)],
    "nothing": [(4, BASE_SLOT)],
    "scaled": [(1, 1, 0.5), (1, 1, -2.0), (1, 0, 1.0), (72, 4, 0.25), (3, 4, 3.0), (1, BASE_SLOT)],
}


def expected(
    y: torch.Tensor, x: torch.Tensor, slots: LoraSlots, rows: list[tuple[float, ...]], module: int | None = None
) -> torch.Tensor:
    """gain * y[i] + t * (shift + scale * (x[i] A^T) B) in float64."""
    wanted, position = y.double().clone(), 0
    module = slots.module_index[MODULE] if module is None else module
    for length, slot, *given in rows:
        scale = given[0] if given else 1.0
        weights = slots.delta(module, slot) if slot != BASE_SLOT else None
        for i in range(position, position + length):
            if weights is None:
                continue
            if weights.gain is not None:
                wanted[i] *= weights.gain.double()
            if weights.shift is not None:
                wanted[i] += scale * weights.shift.double()
            if weights.a is not None:
                wanted[i] += scale * weights.scale * (x[i].double() @ weights.a.double().t()) @ weights.b.double()
        position += length
    return wanted


def tokens_of(rows: list[tuple[float, ...]]) -> LoraTokens:
    return LoraTokens.of((int(length), int(slot), *(given or (1.0,))) for length, slot, *given in rows)


KERNELS = backend_names(kernels)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = (LinearShape(24, 40), LinearShape(65, 7))
COMBINATIONS = list(product(KERNELS, DTYPES, DTYPES, SHAPES))
# Triton's interpreter is slow: the larger shape, and one combination of types, by night.
BY_DAY = [one for one in COMBINATIONS if one[0] != "triton" or (one[3] is SHAPES[1] and one[1:3] != DTYPES)]


@pytest.fixture(params=KERNELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_files_are_the_values_of_the_setting() -> None:
    names = get_args(Settings.model_fields["lora_kernel"].annotation)
    assert names == ("auto", *backend_names(kernels))
    assert {"loop", "native", "triton"} <= set(names)


def test_new_file_in_the_folder_is_a_kernel_and_its_preference_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = (
        "from lora_serve.model.lora.kernels import loop\n\nPREFERENCE = {}\n\n\n"
        "def why_not(slots):\n    return {!r}\n\n\nclass Kernel(loop.Kernel):\n    pass\n"
    )
    for kernel, preference, reason in (("toy", 90, None), ("unable", 99, "it is a toy"), ("unasked", 0, None)):
        (tmp_path / f"{kernel}.py").write_text(toy.format(preference, reason))
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    slots = filled_slots(LinearShape(8, 8), RANKS)
    try:
        assert {"toy", "unable", "unasked"} < set(backend_names(kernels))
        assert type(create_kernel("auto", slots)).__module__.endswith(".toy")
        assert type(create_kernel("unasked", slots)).__module__.endswith(".unasked")
        with pytest.raises(ConfigError, match="--lora-kernel unable: it is a toy"):
            create_kernel("unable", slots)
    finally:
        for kernel in ("toy", "unable", "unasked"):
            sys.modules.pop(f"lora_serve.model.lora.kernels.{kernel}", None)


def test_auto_takes_the_compiled_kernel_and_no_interpreter() -> None:
    slots = filled_slots(LinearShape(8, 8), RANKS)
    name = type(create_kernel("auto", slots)).__module__.rpartition(".")[2]
    assert name == ("native" if native.why_not(slots) is None else "loop")


@pytest.mark.crossed
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(("name", "model_dtype", "adapter_dtype", "shape"), mostly_nightly(COMBINATIONS, *BY_DAY))
def test_delta_is_the_formula(
    name: str, popularity: str, model_dtype: torch.dtype, adapter_dtype: torch.dtype, shape: LinearShape
) -> None:
    torch.manual_seed(0)
    rows = POPULARITIES[popularity]
    slots = filled_slots(shape, RANKS, adapter_dtype)
    kernel = create_kernel(name, slots)
    tokens = sum(row[0] for row in rows)
    x = torch.randn(tokens, shape.in_features).to(model_dtype)
    y = torch.randn(tokens, shape.out_features).to(model_dtype)
    before = y.clone()
    kernel.add(y, x, (slots.module_index[MODULE],), tokens_of(rows))
    wanted = expected(before, x, slots, rows)
    tolerance = 1e-4 if model_dtype == torch.float32 and adapter_dtype == torch.float32 else 6e-2
    assert torch.allclose(y.double(), wanted, atol=tolerance, rtol=tolerance)


def test_triton_of_a_float16_model_gives_a_token_the_same_alone_and_in_a_long_segment() -> None:
    """With weights that bfloat16 holds and float16 does not."""
    torch.manual_seed(0)
    slots = filled_slots(LinearShape(24, 40), (3,), torch.bfloat16)
    delta = slots.delta(slots.module_index[MODULE], 0)
    assert delta is not None
    assert delta.a is not None
    assert delta.b is not None
    delta.a.mul_(3e5)
    delta.b.div_(2e5)
    kernel, module = create_kernel("triton", slots), slots.module_index[MODULE]
    x, y = torch.randn(70, 24).half(), torch.randn(70, 40).half()
    in_tiles, alone = y.clone(), y[:1].clone()
    kernel.add(in_tiles, x, (module,), tokens_of([(70, 0)]))
    kernel.add(alone, x[:1], (module,), tokens_of([(1, 0)]))
    assert torch.allclose(in_tiles.double(), expected(y, x, slots, [(70, 0)]), atol=2e-3, rtol=2e-3)
    assert torch.allclose(in_tiles[0].float(), alone[0].float(), atol=2e-3, rtol=2e-3)


def run_with(kernel: LoraKernel, slots: LoraSlots, x: torch.Tensor, rows: list[tuple[int, int]]) -> torch.Tensor:
    y = torch.zeros(x.shape[0], 40)
    kernel.add(y, x, (slots.module_index[MODULE],), tokens_of(rows))
    return y


def test_row_that_is_not_a_number_stays_alone(name: str) -> None:
    slots = filled_slots(LinearShape(24, 40), RANKS)
    kernel = create_kernel(name, slots)
    x = torch.randn(4, 24)
    clean = run_with(kernel, slots, x, [(1, 0), (1, 1), (1, 0), (1, 2)])
    x[1] = float("nan")
    y = run_with(kernel, slots, x, [(1, 0), (1, 1), (1, 0), (1, 2)])
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


def test_new_owner_of_a_slot_is_used_at_once(name: str) -> None:
    shape = LinearShape(24, 40)
    slots = filled_slots(shape, (4, 4))
    kernel = create_kernel(name, slots)
    x = torch.randn(1, 24)
    before = run_with(kernel, slots, x, [(1, 0)])
    slots.load(SlotRef(0, 2, "new"), random_adapter("new", 9, shape))
    after = run_with(kernel, slots, x, [(1, 0)])
    assert torch.allclose(after.double(), expected(torch.zeros(1, 40), x, slots, [(1, 0)]), atol=1e-4)
    assert not torch.allclose(before, after)
    slots.clear(0)
    assert not run_with(kernel, slots, x, [(1, 0)]).any()


SMALL_BLOCKS = {
    "rows": ({"_ROW_INPUTS": 16, "_ROW_OUTPUTS": 16}, [(1, 0), (1, 1), (1, BASE_SLOT), (1, 1)]),
    "tiles": (
        {"_TILE_PART": 32, "_TILE_INPUTS": 16, "_TILE_RANKS": 16, "_TILE_OUTPUTS": 16},
        [(66, 0), (2, BASE_SLOT), (70, 1)],
    ),
}


@pytest.mark.parametrize("form", SMALL_BLOCKS)
def test_triton_on_wide_layers_is_the_formula_and_keeps_a_rows_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks so small that a layer has several parts of inputs and several pieces of ranks and of outputs."""
    blocks, rows = SMALL_BLOCKS[form]
    for block, size in blocks.items():
        monkeypatch.setattr(triton, block, size)
    torch.manual_seed(0)
    shape, first = LinearShape(85, 40), rows[0][0]
    slots = filled_slots(shape, (3, 20))
    kernel, module = create_kernel("triton", slots), slots.module_index[MODULE]
    num_tokens = sum(row[0] for row in rows)
    x, y = torch.randn(num_tokens, 85), torch.randn(num_tokens, 40)
    together, alone, beside_wider = y.clone(), y[:first].clone(), y[:first].clone()
    kernel.add(together, x, (module,), tokens_of(rows))
    assert torch.allclose(together.double(), expected(y, x, slots, rows), atol=1e-4)
    kernel.add(alone, x[:first], (module,), tokens_of(rows[:1]))
    slots.load(SlotRef(2, 1, "wider"), random_adapter("wider", 40, shape))
    kernel.add(beside_wider, x[:first], (module,), tokens_of(rows[:1]))
    assert torch.equal(together[:first], alone)
    assert torch.equal(alone, beside_wider)


GROUPS = {"whole vectors": (40, 16, 8), "any sizes": (40, 7, 21)}
GROUP_BLOCKS = {"_ROW_INPUTS": 64, "_ROW_OUTPUTS": 16, "_TILE_PART": 64, "_TILE_INPUTS": 64, "_TILE_OUTPUTS": 16}
GROUP_ROWS = [(1, 0), (1, BASE_SLOT), (2, 1), (1, 2), (66, 1, 0.5), (3, 0)]


def filled_group(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> LoraSlots:
    """Layers of 85 inputs: slot 0 adapts all, slot 1 the last, slot 2 the first with a gain and a shift as well."""
    linears = {"before": LinearShape(9, 9), **{f"{i}": LinearShape(85, size) for i, size in enumerate(sizes)}}
    slots = LoraSlots(linears, 3, device)
    targets = ((3, range(len(sizes))), (21, [len(sizes) - 1]), (4, [0]))
    for slot, (rank, members) in enumerate(targets):
        own = {f"{i}": random_adapter("d", rank, linears[f"{i}"], dtype).deltas[MODULE] for i in members}
        slots.load(SlotRef(slot, 1, "d"), HostAdapter("d", rank, own))
    return slots


GROUP_COMBINATIONS = list(product(KERNELS, DTYPES, GROUPS))
GROUPS_BY_DAY = [
    one
    for one in GROUP_COMBINATIONS
    if one[0] != "triton" or one[1:] in ((DTYPES[0], "any sizes"), (DTYPES[1], "whole vectors"))
]


@pytest.mark.parametrize(("name", "dtype", "sizes"), mostly_nightly(GROUP_COMBINATIONS, *GROUPS_BY_DAY))
def test_group_of_layers_is_the_formula_for_each_on_its_columns(
    name: str, dtype: torch.dtype, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several pieces of each layer's outputs and several parts of inputs, where the kernel has such."""
    for block, size in GROUP_BLOCKS.items():
        monkeypatch.setattr(triton, block, size)
    torch.manual_seed(0)
    slots = filled_group(GROUPS[sizes], dtype)
    kernel = create_kernel(name, slots)
    x, y = torch.randn(74, 85), torch.randn(74, 5 + sum(GROUPS[sizes]))
    group, before = (1, 2, 3), y.clone()
    kernel.add(y[:, 5:], x, group, tokens_of(GROUP_ROWS))  # columns of a wider tensor
    assert torch.equal(y[:, :5], before[:, :5])
    parts = zip(group, slots.columns(before[:, 5:], group), slots.columns(y[:, 5:], group), strict=True)
    for module, old, new in parts:
        wanted = expected(old, x, slots, GROUP_ROWS, module)
        tolerance = 1e-4 if dtype == torch.float32 else 6e-2
        assert torch.allclose(new.double(), wanted, atol=tolerance, rtol=tolerance)
    alone = before[:1, 5:].clone()
    kernel.add(alone, x[:1], group, tokens_of(GROUP_ROWS[:1]))
    assert torch.equal(alone, y[:1, 5:])


MANY = [(1, slot) for slot in (0, 1, BASE_SLOT) * by_tier(2, 100)]


@pytest.mark.parametrize("rows", [MANY, [(70, 0), (3, 1)]])
def test_triton_of_large_ranks_and_many_rows_is_the_formula(rows: list[tuple[float, ...]]) -> None:
    torch.manual_seed(0)
    shape = LinearShape(24, 20)
    slots, num_tokens = filled_slots(shape, (256, 100)), int(sum(row[0] for row in rows))
    x, y = torch.randn(num_tokens, 24), torch.randn(num_tokens, 20)
    found = y.clone()
    create_kernel("triton", slots).add(found, x, (slots.module_index[MODULE],), tokens_of(rows))
    assert torch.allclose(found.double(), expected(y, x, slots, rows), atol=1e-3)


class Noted:
    """Stands for the module of Triton programs and notes the type of weights of each launch for tiles."""

    def __init__(self, programs: Any) -> None:
        self._programs, self.types = programs, []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._programs, name)
        return NotedProgram(found, self.types) if name.endswith("_tiles") else found


class NotedProgram:
    def __init__(self, program: Any, types: list[str]) -> None:
        self._program, self._types = program, types

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self._types.append(str(constants["DTYPE"]))
            self._program[grid](*args, **constants)

        return launch


def test_triton_takes_weights_of_both_types_in_one_batch_and_launches_what_there_is() -> None:
    torch.manual_seed(0)
    shape = LinearShape(24, 40)
    slots = filled_slots(shape, (4, 3), torch.bfloat16)
    slots.load(SlotRef(1, 2, "wide"), random_adapter("wide", 3, shape))
    delta = LinearDelta(None, None, 0.0, torch.rand(40) + 0.5, torch.randn(40))
    slots.load(SlotRef(3, 1, "bias"), HostAdapter("bias", 0, {MODULE: delta}))
    kernel: Any = create_kernel("triton", slots)
    noted = kernel._programs = Noted(kernel._programs)
    x, y = torch.randn(300, 24), torch.randn(300, 40)
    rows = [(70, 0), (70, 1), (80, 3), (80, 0, 0.5)]
    types = {
        (0, 1, 3): ["bf16"] * 2 + ["fp32"] * 2,
        (0,): ["bf16"] * 2,
        (1,): ["fp32"] * 2,
        (3,): ["bf16"] * 2,
        (2,): [],
    }

    def added(rows: list[tuple[float, ...]]) -> torch.Tensor:
        num_tokens, found = int(sum(row[0] for row in rows)), y.clone()
        kernel.add(found[:num_tokens], x[:num_tokens], (slots.module_index[MODULE],), tokens_of(rows))
        return found

    together = added(rows)
    assert torch.allclose(together.double(), expected(y, x, slots, rows), atol=1e-4)
    for slots_of_step, launched in types.items():
        noted.types.clear()
        alone = added([(70, slot) for slot in slots_of_step])
        assert sorted(noted.types) == launched
        if slots_of_step == (0,):
            assert torch.equal(alone[:70], together[:70])


def test_slot_without_low_rank_weights_still_rescales(name: str) -> None:
    shape = LinearShape(24, 40)
    slots = filled_slots(shape, (4,))
    delta = LinearDelta(None, None, 0.0, torch.rand(40) + 0.5, torch.randn(40))
    slots.load(SlotRef(1, 1, "bias"), HostAdapter("bias", 0, {MODULE: delta}))
    x, y = torch.randn(77, 24), torch.randn(77, 40)
    rows = [(1, 1), (1, 0), (72, 1), (3, BASE_SLOT)]
    wanted = expected(y, x, slots, rows)
    create_kernel(name, slots).add(y, x, (slots.module_index[MODULE],), tokens_of(rows))
    assert torch.allclose(y.double(), wanted, atol=1e-4)
    slots.clear(1)
    again = y.clone()
    create_kernel(name, slots).add(y, x, (slots.module_index[MODULE],), tokens_of([(1, 1), (76, BASE_SLOT)]))
    assert torch.equal(y, again)
