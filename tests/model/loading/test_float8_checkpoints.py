"""Checkpoints of FP8-dynamic: rows equal PEFT over the dequantised base, and files that lie are refused in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.loading import float8
from lora_serve.model.loading.float8 import Float8Linear
from lora_serve.model.loading.frozen_model import load_frozen
from lora_serve.model.loading.packed_checkpoints import plan_packed
from tests.float8_packer import WEIGHTS, config_of, edit_config, is_quantized, rewritten, save_dequantized, save_float8
from tests.oracle import save_tiny_model
from tests.packed_place import NEAR, PackedPlace, as_it_is, save_adapters

# What rounding inputs to FP8 makes of log-probabilities of these sharp, tiny models, at most and in the mean; 0.50 and
# 0.08 were seen.
FAR, FAR_IN_THE_MEAN = 0.8, 0.12
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in FP8 on this CPU, and are multiplied by the reference."""
    monkeypatch.setattr(float8, "can_multiply", lambda layer, device: True)


@pytest.fixture(scope="module", params=[("llama", "channel"), ("qwen3", "tensor")], ids=lambda pair: pair[0])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedPlace:
    architecture, strategy = request.param
    root = tmp_path_factory.mktemp(architecture)
    plain = save_tiny_model(architecture, root / "source")
    model = save_float8(plain, root / "model", strategy)
    dequantized = save_dequantized(model, root / "dequantized")
    return PackedPlace(model, dequantized, save_adapters(architecture, plain, root))


def round_inputs(model: nn.Module) -> None:
    """The frozen layers of a model that were in FP8 see their inputs as FP8, PEFT's own layers see them as they are."""
    for path, layer in model.named_modules():
        own = path.removesuffix(".base_layer").removesuffix(".original_module")
        if isinstance(layer, nn.Linear) and is_quantized(f"{own}.weight") and "modules_to_save" not in path:
            layer.register_forward_pre_hook(lambda _, inputs: (as_float8(inputs[0]),))


def as_float8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_cpu_serves_it_dequantised_and_every_adapter_is_exact(place: PackedPlace) -> None:
    assert place.differences(place.answers(), as_it_is).max() < NEAR


@pytest.mark.usefixtures("kept")
def test_layers_in_fp8_round_their_inputs_and_adapters_see_them_as_they_are(place: PackedPlace) -> None:
    answers = place.answers()
    same = place.differences(answers, round_inputs)
    assert (same < NEAR).float().mean() > 0.95  # a number at the middle between two of FP8 may fall to either side
    assert same.max() < FAR
    far = place.differences(answers, as_it_is)
    assert far.max() < FAR
    assert far.mean() < FAR_IN_THE_MEAN
    assert (far < NEAR).float().mean() < 0.2  # inputs were rounded indeed


@pytest.mark.usefixtures("kept")
def test_layers_in_fp8_are_exact_but_for_their_inputs(place: PackedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "quantized", lambda x: (x.float(), torch.ones(len(x), 1)))
    assert place.differences(place.answers(), as_it_is).max() < NEAR


def build(model: Path, **settings: Any) -> ModelParts:
    given = Settings(model=str(model), max_model_len=64, **settings)
    return build_model(given.part(ModelConfig), given.part(EngineConfig), 2)


def loaded(model: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return load_frozen(Settings(model=str(model), **settings).part(ModelConfig), AutoModelForCausalLM).module


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama") / "plain")


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_numbers_of_the_file_stay_as_they_are_stored(strategy: str, llama: Path, tmp_path: Path) -> None:
    model = save_float8(llama, tmp_path / "model", strategy, torch.bfloat16)
    stored = load_file(model / WEIGHTS)
    module = loaded(model)
    for name in filter(is_quantized, stored):
        layer = module.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(layer.weight.view(torch.uint8), stored[name].view(torch.uint8))
        assert layer.weight_scale.shape == (layer.out_features, 1)
        assert bool((layer.weight_scale == stored[f"{name}_scale"].float()).all())
    assert type(module.lm_head) is nn.Linear
    assert not hasattr(module.config, "quantization_config")


@pytest.mark.usefixtures("kept")
def test_bytes_told_are_those_of_fp8_and_scales(llama: Path, tmp_path: Path) -> None:
    num_weights = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
    rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    plain = build(llama).spec.num_bytes
    model = save_float8(llama, tmp_path / "model")
    assert build(model).spec.num_bytes == plain - 4 * num_weights + num_weights + 4 * rows


def test_flag_that_contradicts_the_checkpoint_is_refused_and_one_that_agrees_is_not() -> None:
    hf_config = PreTrainedConfig(quantization_config=config_of())
    for flag in ("int8", "int4", "fp8"):
        config = Settings(model="some/model", quantization=flag).part(ModelConfig)
        if flag == "fp8":
            assert plan_packed(config, hf_config, torch.device("cpu")) is not None
        else:
            with pytest.raises(ConfigError, match=rf"--quantization {flag}: .* is quantised already \(fp8\)"):
                plan_packed(config, hf_config, torch.device("cpu"))


CHANGED: Mapping[str, tuple[Any, str]] = {
    "format": ("marlin-24", "'marlin-24'"),
    "kv_cache_scheme": ({"num_bits": 8}, "{'num_bits': 8}"),
    "transform_config": ({"config_groups": {"a": 1}}, "config_groups"),
    "sparsity_config": ({"format": "sparse-24-bitmask"}, "'sparse-24-bitmask'"),
    "config_groups.group_0.format": ("marlin-24", "'marlin-24'"),
    "config_groups.group_0.weights.type": ("int", "'int'"),
    "config_groups.group_0.weights.num_bits": (4, "4"),
    "config_groups.group_0.weights.strategy": ("group", "'group'"),
    "config_groups.group_0.weights.symmetric": (False, "False"),
    "config_groups.group_0.weights.dynamic": (True, "True"),
    "config_groups.group_0.input_activations.dynamic": (False, "False"),
    "config_groups.group_0.input_activations.strategy": ("attn_head", "'attn_head'"),
    "config_groups.group_0.input_activations.type": (None, "None"),
    "config_groups.group_0.output_activations": ({"num_bits": 8}, "{'num_bits': 8}"),
}


def plan(stored: Mapping[str, Any]) -> object:
    config = Settings(model="some/model").part(ModelConfig)
    return plan_packed(config, PreTrainedConfig(quantization_config=stored), torch.device("cpu"))


@pytest.mark.parametrize("field", CHANGED)
def test_other_formats_are_refused_by_field_and_value(field: str) -> None:
    value, shown = CHANGED[field]
    stored: Any = config_of()
    *path, last = field.split(".")
    table = stored
    for part in path:
        table = table[part]
    table[last] = value
    with pytest.raises(ModelError) as caught:
        plan(stored)
    words = str(caught.value)
    assert words.startswith(f"--model some/model: quantization_config.{field} is ")
    assert shown in words
    assert "of compressed-tensors" in words


def test_form_of_the_library_and_a_shorter_one_are_taken() -> None:
    assert plan(config_of("tensor"))
    stored: Any = config_of()
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        del stored[name]
    for name in ("format", "output_activations"):
        del stored["config_groups"]["group_0"][name]
    for name in ("symmetric", "dynamic"):
        del stored["config_groups"]["group_0"]["weights"][name]
    assert plan(stored)


@pytest.mark.parametrize("groups", [None, {}, ["Linear"], {"group_0": ["Linear"]}])
def test_config_without_groups_is_refused(groups: Any) -> None:
    with pytest.raises(ModelError, match=r"quantization_config\.config_groups"):
        plan(config_of() | {"config_groups": groups})


def test_other_methods_are_left_to_others() -> None:
    assert plan({"quant_method": "torchao"}) is None


def _without(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {} if name == f"{Q}_scale" else {name: tensor}


def _scaled(
    change: Callable[[Tensor], Tensor], which: str = f"{Q}_scale"
) -> Callable[[str, Tensor], dict[str, Tensor]]:
    return lambda name, tensor: {name: change(tensor) if name == which else tensor}


def _with(value: float) -> Callable[[Tensor], Tensor]:
    return lambda found: torch.cat([found[:-1], torch.full(found[-1:].shape, value).to(found.dtype)])


def _in_e5m2(weight: Tensor) -> Tensor:
    return weight.float().to(torch.float8_e5m2)


def _in_e4m3(weight: Tensor) -> Tensor:
    return weight.to(torch.float8_e4m3fn)


def _all_plain(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {} if name.endswith("_scale") else {name: tensor.float()}


LAYER = "model.layers.1.self_attn.q_proj: "
NO_NUMBER = LAYER + "its scales have numbers that are negative, infinite or none"
SERVED = r"; of \[32, 32\] it is F32 or BF16 or F16 or F8_E8M0 \[32, 1\] or"
LIES: Mapping[str, tuple[Callable[[str, Tensor], dict[str, Tensor]], str]] = {
    "no scale": (_without, LAYER + "the files lack weight_scale"),
    "too few scales": (
        _scaled(lambda scale: scale[1:]),
        LAYER + r"weight_scale is F32 \[31, 1\]" + SERVED,
    ),
    "scales by input": (_scaled(lambda scale: scale.t()), LAYER + r"weight_scale is F32 \[1, 32\]" + SERVED),
    "scales of integers": (_scaled(lambda scale: scale.to(torch.int32)), LAYER + "weight_scale is I32 .*" + SERVED),
    "a scale that is no number": (_scaled(_with(float("nan"))), NO_NUMBER),
    "an infinite scale": (_scaled(_with(float("inf"))), NO_NUMBER),
    "a negative scale": (_scaled(_with(-0.1)), NO_NUMBER),
    "a weight in bfloat16": (
        _scaled(Tensor.bfloat16, Q),
        LAYER + "weight_scale is F32 .*, of no layer that is packed as fp8",
    ),
    "a weight in e5m2": (_scaled(_in_e5m2, Q), LAYER + "weight is F8_E5M2 .*, of no layer that is packed as fp8"),
    "a weight of another shape": (_scaled(lambda weight: weight[:, 1:], Q), rf"does not fit the weights: {Q}"),
    "an embedding": (
        _scaled(_in_e4m3, "model.embed_tokens.weight"),
        "embed_tokens: the files lack weight_scale",
    ),
    "a number that is none": (_scaled(_with(float("nan")), Q), LAYER + "weight has numbers that are none"),
    "nothing in FP8": (_all_plain, "config.json says that weights are fp8, and its files hold none"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused_in_words(lie: str, llama: Path, tmp_path: Path) -> None:
    rewrite, words = LIES[lie]
    model = rewritten(save_float8(llama, tmp_path / "model"), tmp_path / "lying", rewrite)
    with pytest.raises(ModelError, match=words):
        loaded(model)


def test_scales_of_which_the_config_knows_nothing_are_not_left_out(llama: Path, tmp_path: Path) -> None:
    model = edit_config(save_float8(llama, tmp_path / "model"), quantization_config=None)
    with pytest.raises(
        ModelError, match=r"its files hold model\..*weight_scale, and config.json has no quantization_config"
    ):
        loaded(model)


@pytest.mark.usefixtures("kept")
def test_plain_checkpoint_becomes_fp8_at_load_and_stays_so(llama: Path) -> None:
    module = loaded(llama, quantization="fp8")
    kinds = {name: type(part) for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind is not Float8Linear} == {"lm_head"}
