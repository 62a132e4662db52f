"""Packed checkpoints that lie, or say what is not known here, are refused in words before anything is served."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings
from lora_serve.model.exactness import try_base
from lora_serve.model.loading.frozen_model import load_frozen
from lora_serve.model.loading.packed_checkpoints import plan_packed
from tests.float8_packer import WEIGHTS, edit_config, rewritten
from tests.oracle import save_tiny_model
from tests.tiers import mostly_nightly
from tests.weight_packer import KINDS, Tensors, save_packed

STATE = "weight.quant_state.bitsandbytes__nf4"
LAYER = "model.layers.1.self_attn.q_proj"  # [32, 32]


def part_of(model: Path, **settings: Any) -> ModelConfig:
    return Settings(model=str(model), dtype="float32", max_model_len=64, **settings).part(ModelConfig)


def load(model: Path, **settings: Any) -> None:
    load_frozen(part_of(model, **settings), AutoModelForCausalLM)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("llama")
    plain, known = save_tiny_model("llama", root / "source"), dict[str, Path]()

    def find(kind: str) -> Path:
        if kind not in known:
            known[kind] = save_packed(KINDS[kind], plain, root / kind)[0]
        return known[kind]

    return find


Change = Callable[[Tensor], Tensor | None]


def without(tensor: Tensor) -> None:
    return None


def with_last(value: float) -> Change:
    def change(tensor: Tensor) -> Tensor:
        found = tensor.clone().flatten()
        found[-1] = value
        return found.reshape(tensor.shape)

    return change


def with_text(old: str, new: str) -> Change:
    """Changes the text that bytes are."""

    def change(tensor: Tensor) -> Tensor:
        text = bytes(tensor.tolist()).decode()
        assert old in text
        return torch.tensor(list(text.replace(old, new).encode()), dtype=torch.uint8)

    return change


# kind, last name of a layer's tensor, what becomes of it, words of the refusal
LIES: Mapping[str, tuple[str, str, Change, str]] = {
    "no scales": ("w4a16", "weight_scale", without, "the files lack weight_scale"),
    "no shape": ("w4a16", "weight_shape", without, "the files lack weight_shape, two numbers"),
    "no zero points": ("w4a16_asymmetric", "weight_zero_point", without, "the files lack weight_zero_point"),
    "no order": ("w4a16_actorder", "weight_g_idx", without, "the files lack weight_g_idx"),
    "no codes": ("w4a16", "weight_packed", without, r"weight_s\w+ is .*, of no layer that is packed as"),
    "scales cut off": ("w4a16", "weight_scale", lambda x: x[1:], r"weight_scale is F32 \[31, 2\]; of \[32, 32\] it is"),
    "scales of another group": ("w4a16", "weight_scale", lambda x: x[:, :1], r"weight_scale is F32 \[32, 1\]"),
    "codes cut off": ("w4a16", "weight_packed", lambda x: x[:, 1:], r"weight_packed is I32 \[32, 3\]"),
    "a shape of nothing": ("w4a16", "weight_shape", lambda x: x * 0, r"its size is \[0, 0\]"),
    "a shape that is too large": ("w8a16", "weight_shape", lambda x: x * 2, r"is F32 \[32, 1\]; of \[64, 64\]"),
    "groups that do not divide": ("w4a16", "weight_shape", lambda x: x - 7, "groups of 16 do not divide its 25 inputs"),
    "a scale that is no number": ("w4a16", "weight_scale", with_last(float("nan")), "negative, infinite or none"),
    "a negative scale": ("gptq", "scales", with_last(-0.1), "negative, infinite or none"),
    "an infinite scale": ("awq", "scales", with_last(float("inf")), "negative, infinite or none"),
    "a negative scale of blocks": ("fp8_blocks", "weight_scale_inv", with_last(-1), "negative, infinite or none"),
    "too few blocks": ("fp8_blocks", "weight_scale_inv", lambda x: x[1:], r"weight_scale_inv is F32 \[1, 2\]"),
    "a group out of range": ("w4a16_actorder", "weight_g_idx", with_last(4), "its g_idx names groups 0 to 4 of 4"),
    "a negative group": ("gptq_desc_act", "g_idx", with_last(-1), "its g_idx names groups -1 to 1 of 2"),
    "an order that nobody speaks of": ("gptq", "g_idx", with_last(0), "config.json does not say desc_act"),
    "zero points beyond the bits": ("gptq_desc_act", "qzeros", with_last(-1), "zero points have numbers beyond 4 bits"),
    "zero points beyond 8 bits": ("gptq_8", "qzeros", with_last(0x7F7F7FFF), "zero points have numbers beyond 8 bits"),
    "symmetric with zero points": ("gptq", "qzeros", with_last(0), "its zero points are not in the middle"),
    "no state": ("nf4", STATE, without, "it has 0 quant_state"),
    "a state that is no JSON": ("nf4", STATE, lambda x: x[1:], "Extra data|Expecting"),
    "a state too long": ("nf4", STATE, lambda x: x.repeat(40), "no text of at most"),
    "a state of another size": (
        "nf4", STATE, with_text("[32, 32]", "[32, 64]"), r"weight is \[512, 1\]; of 2048"),
    "a state of a huge size": (
        "nf4", STATE, with_text("[32, 32]", "[999999999999, 32]"), r"weight is \[512, 1\]"),
    "a state with another kind": (
        "nf4", STATE, with_text('"nf4"', '"fp4"'), "quant_type is 'fp4'; of"),
    "a state without blocks": (
        "nf4", STATE, with_text('"blocksize": 64', '"blocksize": 0'), "blocksize is 0"),
    "an offset that is none": (
        "nf4", STATE, with_text('"nested_offset": ', '"nested_offset": 1e999,"x": '), "is inf"),
    "absmax cut off": ("nf4_plain", "weight.absmax", lambda x: x[1:], r"absmax is F32 \[7\]; of .* F32 \[8\]"),
    "nested absmax too long": ("nf4", "weight.nested_absmax", lambda x: x.repeat(2), r"nested_absmax is F32 \[8\]"),
    "nested absmax that is none": ("nf4", "weight.nested_absmax", with_last(float("nan")), "infinite or none"),
    "a table of 15 numbers": ("fp4", "weight.quant_map", lambda x: x[1:], r"quant_map is F32 \[15\]"),
    "a table of large numbers": ("nf4_plain", "weight.quant_map", with_last(7), "not from -1 to 1"),
    "a scale of rows that is negative": ("llm_int8", "SCB", with_last(-1), "negative, infinite or none"),
    "another order of rows": ("llm_int8", "weight_format", lambda x: x + 1, "weight_format is not that of rows"),
    "no scale of the whole": ("nvfp4", "weight_global_scale", without, "the files lack weight_global_scale"),
    "a scale of the whole that is 0": ("nvfp4", "weight_global_scale", lambda x: x * 0, "infinite or none"),
    "scales of groups of another type": ("nvfp4_modelopt", "weight_scale", Tensor.float, r"is F32 \[32, 2\]"),
    "an exponent that is none": ("mxfp4", "weight_scale", with_last(255), "infinite or none"),
    "codes beyond the bits": ("int4_in_bytes", "weight", with_last(9), r"weight has numbers from -\d to 9"),
    "codes of another type": ("gptq", "qweight", lambda x: x.long(), "is I.*, of no layer that is packed as gptq"),
    "codes in no matrix": ("awq", "qweight", lambda x: x[None], r"qweight is \[1, 32, 4\], no matrix"),
    "another width": ("awq", "qweight", lambda x: x[:-16], r"qzeros is I32 \[2, 4\]; of \[32, 16\]"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused_by_a_start_and_by_the_check(
    lie: str, packed: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, last, change, words = LIES[lie]

    def rewrite(name: str, tensor: Tensor) -> Tensors:
        found = change(tensor) if name == f"{LAYER}.{last}" else tensor
        return {} if found is None else {name: found}

    model = rewritten(packed(kind), tmp_path / "lying", rewrite)
    with pytest.raises(ModelError, match=rf"--model .*: {LAYER}.*{words}"):
        load(model)
    if lie != "codes beyond the bits":  # the check reads no codes
        with pytest.raises(ModelError, match=words):
            try_base(part_of(model))


def test_bias_that_the_model_does_not_have_is_dropped_if_it_is_zero(
    packed: Callable[[str], Path], tmp_path: Path
) -> None:
    """Old packers of GPTQ wrote such."""

    def with_bias(value: float) -> Callable[[str, Tensor], Tensors]:
        name_of = f"{LAYER}.qweight"
        return lambda name, x: {name: x} | ({f"{LAYER}.bias": torch.full((32,), value)} if name == name_of else {})

    load(rewritten(packed("gptq"), tmp_path / "zero", with_bias(0)))
    with pytest.raises(ModelError, match=rf"{LAYER}.bias is not zero, and the model has no such bias"):
        load(rewritten(packed("gptq"), tmp_path / "other", with_bias(0.5)))


# kind, field of quantization_config, value, words of the refusal
FIELDS: Mapping[str, tuple[str, str, Any, str]] = {
    "ct_bits": ("w4a16", "config_groups.group_0.weights.num_bits", 3, "is 3; of .* served is 2 or 4 or 8"),
    "ct_group": ("w4a16", "config_groups.group_0.weights.group_size", 0, "is 0; .* or -1 or a whole number"),
    "ct_no_group": ("w4a16", "config_groups.group_0.weights.group_size", None, "strategy 'group' and no group_size"),
    "ct_actorder": ("w4a16", "config_groups.group_0.weights.actorder", "fancy", "is 'fancy'"),
    "ct_inputs": ("w4a16", "config_groups.group_0.input_activations", {"num_bits": 8}, "strategy is None; of"),
    "ct_packed_inputs": ("w4a16", "config_groups.group_0.input_activations", [8], r"is \[8\], not fields"),
    "ct_new_field": ("w4a16", "config_groups.group_0.weights.rotation", "hadamard", "a field not known of"),
    "ct_other_format": ("w4a16", "format", "marlin-24", "is 'marlin-24'; of compressed-tensors served is"),
    "ct_weights": ("w4a16", "config_groups.group_0.weights", None, "weights is None, not fields"),
    "gptq_bits": ("gptq", "bits", 3, "is 3; of gptq served is 2 or 4 or 8"),
    "gptq_bits_in_words": ("gptq", "bits", "4", "is '4'"),
    "gptq_group": ("gptq", "group_size", 5, "groups of 5 do not divide its"),
    "gptq_dynamic": ("gptq", "dynamic", {"+:.*down.*": {"bits": 8}}, "or rules that leave layers out"),
    "gptq_marlin": ("gptq", "checkpoint_format", "marlin", "is 'marlin'"),
    "gptq_rotation": ("gptq", "rotation", "hadamard", "a field not known of gptq"),
    "gptq_adapter": ("gptq", "adapter", {"rank": 8}, "a field not known of gptq"),
    "awq_order": ("awq", "version", "gemv", "is 'gemv'; of awq served is None or 'gemm'"),
    "awq_zeros": ("awq", "zero_point", False, "its zero points are not in the middle"),
    "awq_bits": ("awq", "bits", 8, "is 8"),
    "fp8_format": ("fp8_blocks", "fmt", "e5m2", "is 'e5m2'; of fp8 served is"),
    "fp8_block": ("fp8_blocks", "weight_block_size", [16, 0], r"is \[16, 0\]"),
    "fp8_other_blocks": ("fp8_blocks", "weight_block_size", [16, 16], r"weight_scale_inv is F32 \[\d, 2\]; of"),
    "fp8_cache": ("fp8_blocks", "kv_cache_scheme", "static", "a field not known of fp8"),
    "nvfp4_group": ("nvfp4", "config_groups.group_0.weights.group_size", 32, "is 32; of .* served is 16"),
    "mxfp4_strategy": ("mxfp4", "config_groups.group_0.weights.strategy", "tensor_group", "served is 'group'"),
    "modelopt_kind": ("nvfp4_modelopt", "quant_algo", "W4A8_AWQ", "is 'W4A8_AWQ'; of modelopt served is 'NVFP4'"),
    "bitsandbytes_storage": ("nf4", "bnb_4bit_quant_storage", "bfloat16", "is 'bfloat16'; of bitsandbytes served is"),
    "fbgemm_field": ("fbgemm_fp8", "rotation", "hadamard", "a field not known of fbgemm_fp8"),
    "unknown": ("fp8_blocks", "quant_method", "vptq", "quantised with vptq"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_are_not_known_or_of_other_values_are_refused(
    case: str, packed: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, field, value, words = FIELDS[case]
    stored = copy.deepcopy(KINDS[kind].config)
    *path, last = field.split(".")
    table = stored
    for part in path:
        table = table[part]
    table[last] = value
    model = edit_config(
        rewritten(packed(kind), tmp_path / "model", lambda name, x: {name: x}), quantization_config=stored
    )
    with pytest.raises(ModelError, match=words):
        try_base(part_of(model))
    with pytest.raises(ModelError, match=words):
        load(model)


def test_check_needs_no_weights_and_the_flag_may_not_contradict(packed: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((packed("gptq") / "config.json").read_text())
    assert try_base(part_of(tmp_path)).spec.num_layers
    with pytest.raises(ConfigError, match=r"--quantization int8: .* is quantised already \(gptq, 4 bits\)"):
        try_base(part_of(tmp_path, quantization="int8"))


def test_weights_of_another_size_than_the_model_are_refused(packed: Callable[[str], Path], tmp_path: Path) -> None:
    model = rewritten(packed("w4a16"), tmp_path / "model", lambda name, x: {name: x})
    edit_config(model, intermediate_size=48)
    with pytest.raises(
        ModelError, match=r"config.json does not fit the weights: model.layers.0.mlp.down_proj.weight is \[32, 64\]"
    ):
        load(model)


def test_files_that_are_cut_off_are_refused_by_the_check(packed: Callable[[str], Path], tmp_path: Path) -> None:
    model = rewritten(packed("awq"), tmp_path / "model", lambda name, x: {name: x})
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"--model .*: its weights cannot be read: "):
        try_base(part_of(model))
    with pytest.raises(ModelError, match=r"--model .*: cannot be loaded: "):
        load(model)


def test_check_tells_that_the_weights_are_dequantised(
    packed: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    try_base(part_of(packed("gptq_8")))
    assert "gptq, 8 bits; a start tells how many layers stay so" in caplog.text


ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    [],
    [[]],
    [8, "x"],
    {},
    {"x": {}},
    {"format": []},
)


def places_of(table: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each field of a table and of the tables in it."""
    for name in table:
        yield (*path, name)
        if isinstance(table[name], dict):
            yield from places_of(table[name], (*path, name))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fbgemm_fp8"])  # which has no field that matters
def test_no_value_of_a_field_ends_in_an_error_that_is_not_drawn(kind: str) -> None:
    config = Settings(model="some/model").part(ModelConfig)
    refused = 0
    for *path, last in places_of(KINDS[kind].config):
        for value in ODD:
            stored = copy.deepcopy(KINDS[kind].config)
            table = stored
            for part in path:
                table = table[part]
            table[last] = copy.deepcopy(value)
            try:
                plan_packed(config, PretrainedConfig(quantization_config=stored), torch.device("cpu"))
            except ModelError as error:
                assert str(error).startswith("--model some/model: quantization_config")  # noqa: PT017
                refused += 1
    assert refused > len(ODD)


CHANGES: tuple[Change, ...] = (
    without, torch.flatten, torch.zeros_like, Tensor.float, lambda x: x.flatten()[:0], lambda x: x[None],
    lambda x: x.reshape(-1)[0], lambda x: x.float().to(torch.int32), lambda x: x.float().to(torch.int8),
    lambda x: x.float() > 0, lambda x: torch.stack([x, x]), lambda x: torch.cat([x, x], -1) if x.dim() else x,
)  # fmt: skip


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, "w4a16_actorder", "awq", "fp8_blocks", "nf4", "nvfp4"))
def test_no_tensor_of_a_layer_ends_in_an_error_that_is_not_drawn(
    kind: str, packed: Callable[[str], Path], tmp_path: Path
) -> None:
    model = packed(kind)
    tensors, refused = load_file(model / WEIGHTS), 0
    part = part_of(tmp_path)
    for name in [name for name in tensors if name.startswith(f"{LAYER}.")]:
        for change in CHANGES:
            found = change(tensors[name])
            changed = {**tensors, name: found} if found is not None else {n: x for n, x in tensors.items() if n != name}
            save_file({n: x.contiguous() for n, x in changed.items()}, tmp_path / WEIGHTS, {"format": "pt"})
            plan = plan_packed(part, PretrainedConfig(quantization_config=KINDS[kind].config), torch.device("cpu"))
            assert plan is not None
            try:
                plan.check()
            except ModelError as error:
                assert LAYER in str(error)  # noqa: PT017
                refused += 1
    assert refused > len(CHANGES)


def test_layers_that_are_no_linear_ones_are_refused(tmp_path: Path) -> None:
    plain = save_tiny_model("gpt2", tmp_path / "source")
    with pytest.raises(ModelError, match=r"c_proj.weight is packed, and GPT2LMHeadModel has it as a Conv1D"):
        load(save_packed(KINDS["gptq"], plain, tmp_path)[0])
