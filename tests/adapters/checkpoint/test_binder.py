"""Every tensor to exactly one place, or a refusal that names it: what PEFT trains besides plain LoRA."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from lora_serve.adapters.checkpoint.binder import bind
from lora_serve.adapters.checkpoint.bound import BoundAdapter, TensorPlace, place_of
from lora_serve.adapters.checkpoint.module_patterns import RankRules
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import EmbeddingShape, LinearShape, ModelSpec

Q, K, MLP = "model.layers.0.q_proj", "model.layers.0.k_proj", "model.layers.0.mlp"
EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
LINEARS = {Q: LinearShape(8, 8), K: LinearShape(8, 4), HEAD: LinearShape(8, 50)}
SPEC = ModelSpec(
    "tiny", "TinyForCausalLM", 50, 64, (0,), 1, LINEARS, 0, "float32", "cpu",
    embeddings={EMBEDDING: EmbeddingShape(50, 8)},
    modules={
        EMBEDDING: {"weight": (50, 8)},
        Q: {"weight": (8, 8), "bias": (8,)},
        K: {"weight": (4, 8), "bias": (4,)},
        f"{MLP}.gate": {"weight": (3, 8)},
        f"{MLP}.experts": {"gate_up_proj": (3, 12, 8), "down_proj": (3, 8, 6)},
        NORM: {"weight": (8,), "bias": (8,)},
        HEAD: {"weight": (50, 8)},
    },
    input_embedding=EMBEDDING,
    output_head=HEAD,
)  # fmt: skip
LORA_Q = {f"{Q}.lora_A.weight": (2, 8), f"{Q}.lora_B.weight": (8, 2)}


def bound(shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec = SPEC, **config: Any) -> BoundAdapter:
    settings = {
        "ranks": RankRules(2, 4.0), "target_modules": ("q_proj",), "exclude_modules": (), "layers_to_transform": None,
        "layers_pattern": (), "base_model": "", "ignored": (),
    }  # fmt: skip
    tensors = {f"base_model.model.{name}": TensorInfo(name, "F32", shape, 0, 0) for name, shape in shapes.items()}
    return bind(PeftConfig(**{**settings, **config}), tensors, spec)


def reasons(shapes: Mapping[str, tuple[int, ...]], **config: Any) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        bound(shapes, **config)
    return "; ".join(caught.value.reasons)


def test_cause_of_many_misfits_comes_first() -> None:
    names = [f"model.layers.{layer}.q_proj" for layer in range(9)]
    linears = {**dict.fromkeys(names, LinearShape(8, 8)), HEAD: LINEARS[HEAD]}
    spec = dataclasses.replace(SPEC, linears=linears, modules={name: {"weight": (8, 8)} for name in names})

    def told(width: int, rank: int, end: str = "q_proj") -> list[str]:
        shapes = {f"{n.replace('q_proj', end)}.lora_A.weight": (rank, width) for n in names}
        shapes |= {f"{n.replace('q_proj', end)}.lora_B.weight": (width, rank) for n in names}
        with pytest.raises(InvalidAdapterError) as caught:
            bound(shapes, spec, base_model="acme/other")
        return list(caught.value.reasons)

    other, ranks, strange = told(16, 2), told(8, 4), told(8, 2, "what")
    assert other[0] == "it was trained for acme/other (hidden size 16), and this base model has 8"
    assert ranks[0] == "adapter_config.json says rank 2, and the tensors have rank 4"
    assert strange[0].startswith("it was trained for acme/other: none of its tensors is named as a module")
    assert all(len(reasons) == 5 and reasons[-1].endswith("more of the kind") for reasons in (other, ranks, strange))


def test_width_of_an_inner_layer_alone_is_no_hidden_size() -> None:
    """As of a latent query's second layer, or an expert's."""
    names = [f"model.layers.{layer}.q_{end}_proj" for layer in range(9) for end in "ab"]
    linears = {name: LinearShape(8, 8) for name in names} | {HEAD: LINEARS[HEAD]}
    spec = dataclasses.replace(SPEC, linears=linears, modules={name: {"weight": (8, 8)} for name in names})
    shapes = {f"{n}.lora_A.weight": (2, 4 if "q_b" in n else 8) for n in names}
    shapes |= {f"{n}.lora_B.weight": (8, 2) for n in names}
    with pytest.raises(InvalidAdapterError) as caught:
        bound(shapes, spec, target_modules=("q_a_proj", "q_b_proj"))
    assert not any("hidden size" in reason for reason in caught.value.reasons)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (f"base_model.model.{Q}.lora_A.weight", TensorPlace(Q, "lora_A")),
        (f"base_model.model.{Q}.lora_B.default.weight", TensorPlace(Q, "lora_B")),
        (f"{Q}.lora_B.bias", TensorPlace(Q, "lora_bias")),
        (f"{Q}.lora_magnitude_vector", TensorPlace(Q, "magnitude")),
        (f"{Q}.lora_magnitude_vector.default.weight", TensorPlace(Q, "magnitude")),
        (f"{EMBEDDING}.lora_embedding_A", TensorPlace(EMBEDDING, "embedding_A")),
        (f"{EMBEDDING}.token_adapter.trainable_tokens_delta", TensorPlace(EMBEDDING, "tokens")),
        (f"{EMBEDDING}.base_layer.weight", TensorPlace(EMBEDDING, "parameter", "weight", 1)),
        (f"{MLP}.experts.base_layer.base_layer.lora_A.weight", TensorPlace(f"{MLP}.experts", "lora_A", "", 2)),
        (f"{NORM}.modules_to_save.default.weight", TensorPlace(NORM, "parameter", "weight")),
        (f"{NORM}.weight", TensorPlace(NORM, "parameter", "weight")),
        (f"{Q}.lora_C", None),
        ("weight", None),
    ],
)
def test_names_that_peft_writes_are_read(name: str, place: TensorPlace | None) -> None:
    assert place_of(name) == place


def test_dora_and_biases_go_with_their_layer() -> None:
    found = bound(
        {**LORA_Q, f"{Q}.lora_magnitude_vector": (8,), f"{Q}.base_layer.bias": (8,)}, use_dora=True, bias="lora_only"
    )
    linear = found.linears[Q]
    assert (linear.rank, linear.scale) == (2, 2.0)
    assert linear.magnitude_name == f"base_model.model.{Q}.lora_magnitude_vector"
    assert linear.bias_name == f"base_model.model.{Q}.base_layer.bias"
    assert not found.is_additive
    assert bound(LORA_Q).is_additive
    assert bound({**LORA_Q, f"{Q}.lora_B.bias": (8,)}, lora_bias=True).is_additive


def test_all_biases_are_those_of_untargeted_layers_and_norms_too() -> None:
    biases = {f"{Q}.base_layer.bias": (8,), f"{K}.bias": (4,), f"{NORM}.bias": (8,)}
    found = bound({**LORA_Q, **biases}, bias="all")
    assert found.linears[K].a_name is None
    assert found.linears[K].bias_name == f"base_model.model.{K}.bias"
    assert set(found.parameters) == {NORM}
    assert f"{NORM}.bias is trained, but the file does not hold it" in reasons(
        {**LORA_Q, **dict(list(biases.items())[:2])}, bias="all"
    )


def test_modules_to_save_bring_all_of_their_parameters() -> None:
    whole = {f"{NORM}.weight": (8,), f"{NORM}.bias": (8,), f"{HEAD}.weight": (50, 8)}
    found = bound({**LORA_Q, **whole}, modules_to_save=("norm", "lm_head"))
    assert {path: set(table) for path, table in found.parameters.items()} == {
        NORM: {"weight", "bias"},
        HEAD: {"weight"},
    }
    assert "model.norm.bias is trained" in reasons({**LORA_Q, f"{NORM}.weight": (8,)}, modules_to_save=("norm",))
    assert "does not say that it is trained" in reasons({**LORA_Q, f"{NORM}.weight": (8,)})
    assert "has shape [9]" in reasons(
        {**LORA_Q, f"{NORM}.weight": (9,), f"{NORM}.bias": (8,)}, modules_to_save=("norm",)
    )


def test_module_saved_whole_is_not_targeted_as_well() -> None:
    tensors = {**LORA_Q, f"{K}.weight": (4, 8), f"{K}.bias": (4,)}
    found = bound(tensors, target_modules=("q_proj", "k_proj"), modules_to_save=("k_proj",))
    assert set(found.linears) == {Q}
    assert set(found.parameters) == {K}


def test_copies_of_embedding_and_head_are_taken_beside_anything() -> None:
    copies = {f"{EMBEDDING}.base_layer.weight": (50, 8), f"{HEAD}.base_layer.weight": (50, 8)}
    assert set(bound({**LORA_Q, **copies}).parameters) == {EMBEDDING, HEAD}


def test_copy_of_another_shape_is_refused() -> None:
    copies = {f"{HEAD}.weight": (50, 8), f"{HEAD}.modules_to_save.weight": (2**31,) * 7 + (0,)}
    assert "one and the same to PEFT, but they differ" in reasons({**LORA_Q, **copies})


def test_trained_tokens_need_rows_for_just_their_ids() -> None:
    rows = {**LORA_Q, f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (3, 8)}
    assert bound(rows, trained_tokens=(("", (4, 5, 49)),)).tokens[EMBEDDING].token_ids == (4, 5, 49)
    assert bound(rows, trained_tokens=(("embed_tokens", (4, 5, 49)),)).tokens.keys() == {EMBEDDING}
    assert "has shape [3, 8]" in reasons(rows, trained_tokens=(("", (4, 5)),))
    assert "no row of lm_head for the new tokens 50 to 50" in reasons(rows, trained_tokens=(("", (4, 5, 50)),))
    assert "different ids below 50" in reasons(rows, trained_tokens=(("", (4, 5, 5)),))
    assert "no embedding of the base model" in reasons(rows, trained_tokens=(("positions", (4, 5, 6)),))
    assert "does not say that it is trained" in reasons(rows)


def test_trained_tokens_of_a_tied_head_with_a_bias_are_refused_as_peft_leaves_the_bias_out() -> None:
    rows = {**LORA_Q, f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (3, 8)}
    spec = dataclasses.replace(SPEC, ties_embeddings=True)
    assert bound(rows, spec, trained_tokens=(("", (4, 5, 49)),)).tokens.keys() == {EMBEDDING}
    spec = dataclasses.replace(spec, modules={**SPEC.modules, HEAD: {"weight": (50, 8), "bias": (50,)}})
    with pytest.raises(InvalidAdapterError, match="leaves out the bias of the tied output head"):
        bound(rows, spec, trained_tokens=(("", (4, 5, 49)),))


@pytest.mark.parametrize("count", [1, 3])
def test_stack_of_one_expert_that_lies_in_out_is_refused_as_peft_gets_it_wrong(count: int) -> None:
    experts = f"{MLP}.experts"
    tensors = {f"{experts}.lora_A.weight": (2 * count, 8), f"{experts}.lora_B.weight": (8, 2 * count)}
    module = place_of(f"{experts}.lora_A.weight")
    assert module is not None
    modules = {**SPEC.modules, module.module: {"down_proj": (count, 8, 8)}}
    spec = dataclasses.replace(SPEC, modules=modules, transposed=frozenset({module.module}))
    config = {"target_modules": (), "target_parameters": ("experts.down_proj",)}
    if count > 1:
        assert bound(tensors, spec, **config).deltas.keys() == {module.module}
    else:
        with pytest.raises(InvalidAdapterError, match="a single expert, transposed"):
            bound(tensors, spec, **config)


def test_lora_of_what_is_no_plain_layer_is_refused_in_these_words() -> None:
    router = f"{MLP}.router"
    tensors = {**LORA_Q, f"{router}.lora_A.weight": (2, 8), f"{router}.lora_B.weight": (4, 2)}
    spec = dataclasses.replace(SPEC, modules={**SPEC.modules, place_of(f"{router}.weight").module: {"weight": (4, 8)}})
    with pytest.raises(InvalidAdapterError, match="router, which PEFT cannot run, as it is no plain layer"):
        bound(tensors, spec, target_modules=("q_proj", "router"))


def test_experts_are_told_apart_by_the_order_in_which_peft_wraps_them() -> None:
    experts = f"{MLP}.experts"
    found = bound(
        {
            f"{experts}.base_layer.lora_A.weight": (6, 8),
            f"{experts}.base_layer.lora_B.weight": (12, 6),
            f"{experts}.lora_A.weight": (6, 6),
            f"{experts}.lora_B.weight": (8, 6),
            f"{MLP}.gate.lora_A.weight": (2, 8),
            f"{MLP}.gate.lora_B.weight": (3, 2),
        },
        target_modules=(),
        target_parameters=("experts.gate_up_proj", "experts.down_proj", "gate.weight"),
    )
    table = found.deltas[experts]
    assert table["gate_up_proj"].a_name.endswith("base_layer.lora_A.weight")
    assert table["down_proj"].a_name == f"base_model.model.{experts}.lora_A.weight"
    assert (table["down_proj"].num_experts, found.deltas[f"{MLP}.gate"]["weight"].num_experts) == (3, 1)
    one = {f"{experts}.lora_A.weight": (6, 6), f"{experts}.lora_B.weight": (8, 6)}
    assert bound(one, target_modules=(), target_parameters=("experts.down_proj",)).deltas.keys() == {experts}
    assert "has shape [6, 6]" in reasons(one, target_modules=(), target_parameters=("experts.gate_up_proj",))


def test_experts_that_lie_in_by_out_are_asked_for_the_shapes_that_peft_gives_them() -> None:
    experts = f"{MLP}.experts"
    spec = dataclasses.replace(SPEC, transposed=frozenset({experts}))
    stack = {f"{experts}.lora_A.weight": (6, 8), f"{experts}.lora_B.weight": (6, 6)}  # [3, in 8, out 6], rank 2
    named = {"target_modules": (), "target_parameters": ("experts.down_proj",)}
    assert bound(stack, spec, **named).deltas[experts]["down_proj"].num_experts == 3
    assert "has shape [6, 8]" in reasons(stack, **named)
    matrix = {f"{MLP}.gate.lora_A.weight": (2, 8), f"{MLP}.gate.lora_B.weight": (3, 2)}
    both = dataclasses.replace(SPEC, transposed=frozenset({experts, f"{MLP}.gate"}))
    assert bound(matrix, both, target_modules=(), target_parameters=("gate.weight",)).deltas.keys() == {f"{MLP}.gate"}


def test_a_linear_layers_weight_as_target_parameter_is_ordinary_lora() -> None:
    found = bound(LORA_Q, target_modules=(), target_parameters=("q_proj.weight",))
    assert found.linears.keys() == {Q}
    assert found.is_additive


def test_tied_head_takes_the_embeddings_delta_only_where_the_config_says_so() -> None:
    tied = dataclasses.replace(SPEC, ties_embeddings=True)
    tensors = {
        f"{EMBEDDING}.lora_embedding_A": (2, 50), f"{EMBEDDING}.lora_embedding_B": (8, 2),
        f"{HEAD}.lora_A.weight": (2, 8), f"{HEAD}.lora_B.weight": (50, 2),
    }  # fmt: skip
    settings = {"target_modules": ("embed_tokens",), "ensure_weight_tying": True}
    assert bound(tensors, tied, **settings).linears.keys() == {HEAD}
    assert "weights for lm_head, but the config does not target it" in reasons(tensors, **settings)


def test_activated_lora_may_hold_nothing_but_lora() -> None:
    assert bound(LORA_Q, invocation_tokens=(1, 2)).is_additive
    assert "plain LoRA" in reasons(
        {**LORA_Q, f"{Q}.lora_magnitude_vector": (8,)}, use_dora=True, invocation_tokens=(1, 2)
    )


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (f"{Q}.lora_magnitude_vector", (8,), "lora_magnitude_vector' is there, but the config does not say"),
        (f"{Q}.lora_B.bias", (8,), "lora_B.bias' is there, but the config does not say"),
        (f"{Q}.base_layer.bias", (8,), "bias' is there, but the config does not say"),
        (f"{K}.lora_A.weight", (2, 8), f"weights for {K}, but the config does not target it"),
        (f"{EMBEDDING}.lora_embedding_A", (2, 50), f"weights for {EMBEDDING}, but the config does not target it"),
        ("model.layers.9.q_proj.lora_A.weight", (2, 8), "belongs to no module of TinyForCausalLM"),
        (f"{Q}.lora_C.weight", (2, 8), "belongs to no module of TinyForCausalLM"),
    ],
)
def test_tensor_that_the_config_does_not_ask_for_is_named(name: str, shape: tuple[int, ...], words: str) -> None:
    assert words in reasons({**LORA_Q, name: shape})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, f"magnitude of {Q} is missing"),
        ({"lora_bias": True}, f"lora_bias of {Q} is missing"),
        ({"bias": "lora_only"}, f"{Q}.bias is trained, but the file does not hold it"),
        ({"modules_to_save": ("lm_head",)}, "lm_head.weight is trained, but the file does not hold it"),
        ({"trained_tokens": (("", (1,)),)}, f"tokens of {EMBEDDING} is missing"),
        ({"target_parameters": ("gate.weight",)}, f"lora_A of {MLP}.gate is missing"),
        ({"target_modules": ("q_proj", "k_proj")}, f"names {K}, but the file has no weights for it"),
        ({"target_modules": ("q_proj", "embed_tokens")}, f"embedding_A of {EMBEDDING} is missing"),
    ],
)
def test_what_the_config_asks_for_and_the_file_lacks_is_named(config: dict[str, Any], words: str) -> None:
    assert words in reasons(LORA_Q, **config)


def test_token_far_beyond_the_vocabulary_is_refused_without_counting_what_lies_between() -> None:
    tracemalloc.start()
    words = reasons(LORA_Q, trained_tokens=(("", (3_000_000,)),))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "more than 65536 above" in words
    assert most < 2**22
