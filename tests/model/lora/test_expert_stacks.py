"""What adapters add to stacks of experts: the formula in float64 and PEFT, in steps that are captured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_serve.core.batch import BASE_SLOT, Batch, SlotRef
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta, in_arena
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import DeviceTokens, segments_of
from tests import oracle
from tests.local_engine import LocalEngine
from tests.model.runner.test_step_graphs import World, chunk, decode
from tests.model.tiny import CPU, MODULE
from tests.oracle import load_alone, load_fresh, logprobs_alone

NUM_EXPERTS = 3
STACK = f"{MODULE}.down_proj"
SHAPE = LinearShape(40, 24)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
TOLERANCE = 1e-3  # of a log-probability


def stack_delta(rank: int, dtype: torch.dtype) -> LinearDelta:
    a, b = torch.randn(NUM_EXPERTS, rank, SHAPE.in_features), torch.randn(NUM_EXPERTS, rank, SHAPE.out_features)
    return LinearDelta((a / SHAPE.in_features**0.5).to(dtype), b.to(dtype), 0.5)


def filled_slots(dtype: torch.dtype) -> LoraSlots:
    """A linear layer and a stack; slots 0 and 1 adapt the stack, slot 2 nothing."""
    slots = LoraSlots({MODULE: SHAPE}, 3, CPU)
    slots.add_modules({STACK: SHAPE})
    for index, rank in enumerate((3, 20)):
        adapter = HostAdapter(f"d{index}", rank, {STACK: stack_delta(rank, dtype)})
        slots.load(SlotRef(index, 1, f"d{index}"), in_arena(adapter, slots.module_index, pin=False))
    return slots


@pytest.mark.parametrize("per_row", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_the_formula_and_keep_their_bits_alone(dtype: torch.dtype, per_row: int) -> None:
    torch.manual_seed(0)
    stacked = filled_slots(dtype)
    kernel, module = create_kernel("triton", stacked), stacked.module_index[STACK]
    slots = torch.tensor([0, 0, 1, 1, BASE_SLOT, BASE_SLOT, 2, 2, 1, 1], dtype=torch.int32)
    experts = torch.tensor([0, 2, 1, 0, 2, 1, 0, 1, 2, 1])
    scales = torch.tensor([1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0, -2.0, -2.0])
    x, y = torch.randn(len(experts) // per_row, SHAPE.in_features), torch.randn(len(experts), SHAPE.out_features)
    wanted, before = y.double(), y.clone()
    for pair, (slot, expert) in enumerate(zip(slots.tolist(), experts.tolist(), strict=True)):
        delta = stacked.delta(module, slot)
        if delta is not None and delta.a is not None and delta.b is not None:
            low = x[pair // per_row].double() @ delta.a[expert].double().t()
            wanted[pair] += scales[pair] * delta.scale * low @ delta.b[expert].double()
    kernel.add_pairs(y, x, module, slots, scales, experts)
    assert torch.allclose(y.double(), wanted, atol=1e-4)
    assert torch.equal(y[4:8], before[4:8])
    for first in (0, 2, 8):
        own, alone = slice(first, first + per_row), before[first : first + per_row].clone()
        kernel.add_pairs(alone, x[own.start // per_row :][:1], module, slots[own], scales[own], experts[own])
        assert torch.equal(alone, y[own])


def test_each_token_has_the_slot_and_the_scale_of_its_segment() -> None:
    pieces = [(3, 1, 0.5), (2, BASE_SLOT, 1.0), (70, 2, -3.0), (1, 0, 1.0), (65, 1, 1.0)]
    segments, num_tokens = segments_of(pieces)
    slots, scales = DeviceTokens.of(num_tokens, segments, CPU).of_each_token()
    assert slots.tolist() == [slot for length, slot, _ in pieces for _ in range(length)]
    assert scales.tolist() == [scale for length, _, scale in pieces for _ in range(length)]
    of_short, _ = DeviceTokens.of(4, segments_of([(1, 0, 1.0), (3, 1, 1.0)])[0], CPU).of_each_token()
    assert of_short.tolist() == [0, 1, 1, 1]


@pytest.fixture(scope="module", params=[("mixtral", 16), ("gpt_oss", 32)], ids=["out_by_in", "in_by_out"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Stacks either way round; the second's down_proj is square, as in gpt-oss, so that no shape tells how it lies."""
    architecture, inner = request.param
    root = tmp_path_factory.mktemp(architecture)
    return World(root, ("q_proj",), architecture, EXPERTS, num_hidden_layers=1, intermediate_size=inner)


def test_rows_with_adapters_of_experts_are_captured(world: World) -> None:
    a, b = world.load("a", 0, 1), world.load("b", 1, 1)
    assert not any(world.plain._slots.has_changes(slot) for slot in (0, 1))
    tables = [world.prompt(i, 4 + i) for i in range(3)]
    world.agree([decode(0, 4, tables[0], 9, a), decode(1, 5, tables[1], 8), decode(2, 6, tables[2], 7, b)])
    num_captured = len(world.recorders)
    world.agree([decode(0, 4, tables[0], 30, b), decode(1, 5, tables[1], 40, a), decode(2, 6, tables[2], 50)])
    world.agree([decode(0, 4, tables[0], 9, world.load("c", 0, 2))])
    assert len(world.recorders) == num_captured + 1  # of one row
    assert not world.graphs.stats().num_failed


def test_experts_that_no_adapter_of_the_step_touches_are_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.plain._model.kernel, "add_pairs", None)
    narrow, table = world.load("narrow", 0, 9), world.prompt(0, 4)
    (found,) = world.plain.run(Batch((decode(0, 4, table, 9, narrow),), ()))
    assert found.error is None
    with pytest.raises(TypeError):
        world.plain.run(Batch((decode(0, 4, table, 9, world.load("a", 0, 10)),), ()))


@pytest.mark.nightly
def test_rows_with_adapters_of_experts_say_what_peft_says(world: World) -> None:
    """In one step, long enough for tiles, and each beside the others."""
    longest = 18 if world.engine.parts.spec.transposed else 66  # of more than one segment, which is slow: once
    check_against_peft(world.engine, {"a": 5, None: 3, "b": longest})


STACKS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"intermediate_size": 32},  # its down_proj is square: no shape tells how it lies
    "llama4_text": {"intermediate_size": 48},
    "aria_text": {"intermediate_size": 32},
}
OTHERS = {  # of which the matrix of kinds has none
    "llama4_text": {
        "head_dim": 16, "num_local_experts": 3, "no_rope_layers": [1], "layer_types": ["full_attention"],
        "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1,
    },
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
}  # fmt: skip


@pytest.mark.parametrize("architecture", STACKS)
def test_stacks_that_are_computed_expert_by_expert_say_what_peft_says(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "ARCHITECTURES", {**oracle.ARCHITECTURES, **OTHERS})
    model = oracle.save_tiny_model(architecture, tmp_path / "model", num_hidden_layers=1, **STACKS[architecture])
    weights = [name for name, tensor in load_fresh(model).named_parameters() if tensor.dim() == 3]
    named = {"a": weights, "b": [weights[-1]]}
    if architecture == "gpt_oss":  # matrices beside the stacks: biases of all experts, a router
        named["c"] = [*weights, *(f"{name}_bias" for name in weights), "mlp.router.weight"]
    adapters = {
        name: oracle.save_adapter(model, tmp_path / name, seed=i, target_modules=["q_proj"], target_parameters=paths)
        for i, (name, paths) in enumerate(named.items())
    }
    engine = LocalEngine(model, adapters, block_size=4, max_loras=3, kv_cache_memory="200KiB")
    check_against_peft(engine, {"a": 5, None: 3, "b": 9, **dict.fromkeys(named.keys() - {"a", "b"}, 4)})


def check_against_peft(engine: LocalEngine, lengths: Mapping[str | None, int]) -> None:
    """Rows of one step with prompts of so many tokens, by the names of their adapters, as PEFT computes each alone."""
    model, generator = Path(engine.settings.model), torch.Generator().manual_seed(1)
    prompts = {n: torch.randint(3, 97, (length,), generator=generator).tolist() for n, length in lengths.items()}
    requests = [engine.request(prompts[name], name, max_tokens=1, logprobs=1, prompt_logprobs=1) for name in lengths]
    for name, answer in zip(lengths, engine.run(requests), strict=True):
        plain = load_fresh(model) if name is None else load_alone(model, engine._folders[name])
        truth, base = (logprobs_alone(one, prompts[name], answer.token_ids) for one in (plain, load_fresh(model)))
        assert answer.prompt_logprobs is not None
        found = [*answer.prompt_logprobs[1:], *answer.logprobs]
        tokens = [*prompts[name][1:], *answer.token_ids]
        mine = torch.tensor([item.logprob for item in found if item is not None])
        wanted, unadapted = (_of_tokens(one, tokens) for one in (truth, base))
        assert torch.allclose(mine, wanted, atol=TOLERANCE), name
        assert name is None or not torch.allclose(mine, unadapted, atol=TOLERANCE)


@pytest.mark.nightly
def test_compiled_layers_add_what_adapters_add_to_experts(tmp_path: Path) -> None:
    """The layer is compiled for a step without adapters, and finds each stack's deltas in steps with them."""
    world = World(tmp_path, ("q_proj",), "mixtral", EXPERTS, num_hidden_layers=1)
    rows = (chunk(0, 0, 9, 1, world.load("a", 0, 1)), chunk(1, 0, 5, 10), chunk(2, 0, 7, 20, world.load("b", 1, 1)))
    step, _ = world.plain._packer.pack(rows)
    own = world.plain._model.logits(step).clone()
    assert world.plain._model.compile().num_layers == 1
    assert torch.allclose(world.plain._model.logits(step), own, atol=1e-4)


def _of_tokens(logprobs: Tensor, tokens: list[int]) -> Tensor:
    return logprobs[torch.arange(len(tokens)), tokens]
