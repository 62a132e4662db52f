"""LoRA of single experts finds its part of the stacked parameters, or is refused with the tensors named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.adapters.checkpoint.binder import bind
from lora_serve.adapters.checkpoint.bound import BoundAdapter, BoundDelta, BoundExperts
from lora_serve.adapters.checkpoint.expert_binder import num_old_layers
from lora_serve.adapters.checkpoint.module_patterns import RankRules
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.adapters.registration.verification import kinds_of
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import LinearShape, ModelSpec

Shapes = Mapping[str, tuple[int, ...]]
Q, BLOCK = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp"
MIXTRAL, QWEN = "model.layers.0.block_sparse_moe", BLOCK
EXPERTS, GATE = f"{BLOCK}.experts", f"{BLOCK}.gate"
NAMES = {MIXTRAL: ("w1", "w3", "w2"), QWEN: ("gate_proj", "up_proj", "down_proj")}
SPEC = ModelSpec(
    "tiny", "TinyForCausalLM", 50, 64, (0,), 1, {Q: LinearShape(8, 8)}, 0, "float32", "cpu",
    modules={
        Q: {"weight": (8, 8)}, GATE: {"weight": (3, 8)},
        EXPERTS: {"gate_up_proj": (3, 12, 8), "down_proj": (3, 8, 6)},
    },
)  # fmt: skip


def lora(path: str, num_in: int, num_out: int, rank: int = 2) -> dict[str, tuple[int, ...]]:
    return {f"{path}.lora_A.weight": (rank, num_in), f"{path}.lora_B.weight": (num_out, rank)}


def one_by_one(block: str, ranks: tuple[int, int, int] = (2, 2, 2)) -> dict[str, tuple[int, ...]]:
    """Of three experts; a rank of 0 leaves a layer out."""
    found: dict[str, tuple[int, ...]] = {}
    for expert in range(3):
        for name, rank, sizes in zip(NAMES[block], ranks, ((8, 6), (8, 6), (6, 8)), strict=True):
            found |= lora(f"{block}.experts.{expert}.{name}", *sizes, rank) if rank else {}
    return found


def config_of(**settings: Any) -> PeftConfig:
    plain = {
        "ranks": RankRules(2, 4.0), "target_modules": ("w1", "w2", "w3"), "exclude_modules": (),
        "layers_to_transform": None, "layers_pattern": (), "base_model": "", "ignored": (),
    }  # fmt: skip
    return PeftConfig(**{**plain, **settings})


def bound(shapes: Shapes, spec: ModelSpec = SPEC, **settings: Any) -> BoundAdapter:
    tensors = {f"base_model.model.{name}": TensorInfo(name, "F32", shape, 0, 0) for name, shape in shapes.items()}
    return bind(config_of(**settings), tensors, spec)


def reasons(shapes: Shapes, spec: ModelSpec = SPEC, **config: Any) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        bound(shapes, spec, **config)
    return "; ".join(caught.value.reasons)


def without(shapes: Shapes, *parts: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize("block", NAMES)
def test_every_experts_layers_are_parts_of_two_parameters(block: str) -> None:
    gate, up, down = NAMES[block]
    table = bound(one_by_one(block), target_modules=NAMES[block]).deltas[EXPERTS]
    both, last = table["gate_up_proj"], table["down_proj"]
    assert isinstance(both, BoundExperts)
    assert isinstance(last, BoundExperts)
    assert both.parts[0][2].a_name == f"base_model.model.{block}.experts.2.{gate}.lora_A.weight"
    assert both.parts[1][0].b_name == f"base_model.model.{block}.experts.0.{up}.lora_B.weight"
    assert last.parts[0][1].a_name == f"base_model.model.{block}.experts.1.{down}.lora_A.weight"
    assert (both.rank, both.scale, both.num_experts, both.shape) == (4, 2.0, 3, LinearShape(8, 6))
    assert (last.rank, last.scale, last.num_experts, last.shape) == (2, 2.0, 3, LinearShape(6, 8))


@pytest.mark.parametrize("block", NAMES)
def test_router_is_a_matrix_beside_them_or_alone(block: str) -> None:
    router = lora(f"{block}.gate", 8, 3)
    delta = bound({**one_by_one(block), **router}, target_modules=(*NAMES[block], "gate")).deltas[GATE]["weight"]
    assert isinstance(delta, BoundDelta)
    assert delta.b_name == f"base_model.model.{block}.gate.lora_B.weight"
    assert (delta.rank, delta.scale, delta.num_experts) == (2, 2.0, 1)
    assert bound(router, target_modules=("gate",)).deltas.keys() == {GATE}


def test_router_of_a_checkpoint_of_today_is_left_to_its_target_parameter() -> None:
    found = bound(lora(GATE, 8, 3), target_modules=(), target_parameters=("gate.weight",))
    assert found.deltas.keys() == {GATE}


def test_patterns_and_targets_mean_the_old_paths() -> None:
    ranks = RankRules(2, 4.0, (("w3", 3), (r"experts\.1\.w1", 1)), (("w2", 8.0),))
    shapes = {**one_by_one(MIXTRAL, (2, 3, 2)), **lora(f"{MIXTRAL}.experts.1.w1", 8, 6, 1)}
    table = bound(shapes, ranks=ranks, target_modules=r".*block_sparse_moe\.experts\.\d\.w[123]").deltas[EXPERTS]
    assert (table["gate_up_proj"].rank, table["down_proj"].scale) == (5, 4.0)
    assert table["gate_up_proj"].parts[0][1].rank == 1
    kept = without(one_by_one(MIXTRAL), "experts.1.w2")
    assert set(bound(kept, exclude_modules=("experts.1.w2",)).deltas[EXPERTS]["down_proj"].parts[0]) == {0, 2}
    assert bound(one_by_one(MIXTRAL, (0, 0, 2)), target_modules=("w2",)).deltas[EXPERTS].keys() == {"down_proj"}


def test_all_linear_means_every_expert_and_the_router_if_any_router_is_there() -> None:
    rest = {**lora(Q, 8, 8), **one_by_one(MIXTRAL)}
    found = bound({**rest, **lora(f"{MIXTRAL}.gate", 8, 3)}, target_modules="all-linear")
    assert (found.linears.keys(), found.deltas.keys()) == ({Q}, {EXPERTS, GATE})
    assert bound(rest, target_modules="All-Linear").deltas.keys() == {EXPERTS}
    half = {f"{MIXTRAL}.gate.lora_A.weight": (2, 8)}
    assert f"missing: lora_B of {MIXTRAL}.gate" in reasons({**rest, **half}, target_modules="all-linear")


def test_base_without_stacked_experts_takes_none() -> None:
    spec = dataclasses.replace(SPEC, modules={Q: {"weight": (8, 8)}, EXPERTS: {"gate_up_proj": (3, 12, 8)}})
    assert f"{MIXTRAL}.experts.0.w1.lora_A.weight' belongs to no module" in reasons(one_by_one(MIXTRAL), spec)


def test_router_that_is_a_linear_layer_still_or_no_matrix_is_none_of_the_old_layers() -> None:
    linear = dataclasses.replace(SPEC, linears={Q: LinearShape(8, 8), GATE: LinearShape(8, 3)})
    shapes = {**one_by_one(QWEN), **lora(GATE, 8, 3)}
    found = bound(shapes, linear, target_modules=(*NAMES[QWEN], "gate"))
    assert (found.linears.keys(), found.deltas.keys()) == ({GATE}, {EXPERTS})
    none = dataclasses.replace(SPEC, modules={EXPERTS: SPEC.modules[EXPERTS], GATE: {"bias": (3,)}})
    assert bound(one_by_one(MIXTRAL), none, target_modules=("w1", "w2", "w3", "gate")).deltas.keys() == {EXPERTS}


def test_adapter_of_experts_is_not_additive_and_its_card_says_why() -> None:
    found = bound(one_by_one(MIXTRAL))
    assert not found.is_additive
    assert kinds_of(Artifact("sha256:0", config_of(), {}, found)) == ["experts"]
    assert "plain LoRA of linear layers" in reasons(one_by_one(MIXTRAL), invocation_tokens=(1,))


@pytest.mark.parametrize(
    ("shapes", "config", "words"),
    [
        (lora(f"{MIXTRAL}.experts.3.w1", 8, 6), {}, "experts.3.w1.lora_A.weight' belongs to no module of Tiny"),
        (lora(f"{MIXTRAL}.experts.0.w4", 8, 6), {}, "experts.0.w4.lora_A.weight' belongs to no module of Tiny"),
        (lora(f"{MIXTRAL}.experts.1.w2", 6, 8, 3), {}, "experts.1.w2.lora_A.weight' has shape [3, 6]"),
        (lora(f"{MIXTRAL}.experts.1.w1", 6, 8), {}, "experts.1.w1.lora_B.weight' has shape [8, 2]"),
        (lora(f"{MIXTRAL}.gate", 8, 3), {}, f"weights for {MIXTRAL}.gate, but the config does not target it"),
        ({}, {"target_modules": ("w1", "w2")}, f"weights for {MIXTRAL}.experts.0.w3, but the config does not target"),
        ({}, {"target_modules": ("w1", "w2", "w3", "gate")}, f"missing: lora_A of {MIXTRAL}.gate"),
        ({}, {"use_dora": True}, f"use_dora is not supported on single experts and their routers, such as {MIXTRAL}"),
        ({}, {"lora_bias": True}, "lora_bias is not supported on single experts"),
        ({f"{MIXTRAL}.experts.1.w1.lora_magnitude_vector": (6,)}, {}, "w1.lora_magnitude_vector' is none of the plain"),
        ({f"{MIXTRAL}.experts.1.w1.lora_B.bias": (6,)}, {}, "experts.1.w1.lora_B.bias' is none of the plain LoRA"),
        ({f"{MIXTRAL}.experts.1.w1.base_layer.bias": (6,)}, {}, "w1.base_layer.bias' belongs to no module"),
        ({f"{MIXTRAL}.experts.1.w1.lora_A.default.weight": (2, 8)}, {}, "w1.lora_A.default.weight' is there twice"),
        (lora(EXPERTS, 6, 8, 6), {"target_parameters": ("experts.down_proj",)}, "experts.lora_A.weight' changes all"),
        (lora(f"{EXPERTS}.base_layer", 8, 12, 6), {}, "experts.base_layer.lora_A.weight' changes all experts"),
        (lora(f"{QWEN}.experts.0.gate_proj", 8, 6), {}, f"{QWEN}.experts.0.gate_proj.lora_A.weight' belongs to no"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(shapes: Shapes, config: dict[str, Any], words: str) -> None:
    assert words in reasons({**one_by_one(MIXTRAL), **shapes}, **config)


def test_missing_experts_are_named_the_first_of_many_in_one_reason() -> None:
    one = without(one_by_one(MIXTRAL), "experts.1.w2", "experts.2.w3.lora_B")
    assert reasons(one) == (
        f"missing: lora_A of {MIXTRAL}.experts.1.w2, lora_B of {MIXTRAL}.experts.1.w2, lora_B of {MIXTRAL}.experts.2.w3"
    )
    assert reasons(lora(f"{MIXTRAL}.experts.0.w1", 8, 6)).count("lora_A of") == 8
    wide = {EXPERTS: {"gate_up_proj": (30, 12, 8), "down_proj": (30, 8, 6)}}
    many = reasons(one_by_one(MIXTRAL), dataclasses.replace(SPEC, modules={**SPEC.modules, **wide}))
    assert many.endswith(f"and {27 * 3 * 2 - 16} more")


def test_stacks_that_lie_in_by_out_were_never_saved_one_by_one() -> None:
    modules = {**SPEC.modules, EXPERTS: {"gate_up_proj": (3, 8, 12), "down_proj": (3, 6, 8)}}
    spec = dataclasses.replace(SPEC, modules=modules, transposed=frozenset({EXPERTS}))
    assert num_old_layers(SPEC) == 10
    assert num_old_layers(spec) == 0
    with pytest.raises(InvalidAdapterError, match="belongs to no module"):
        bound(one_by_one(QWEN), spec, target_modules=NAMES[QWEN])
