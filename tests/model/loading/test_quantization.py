"""Bases that torchao and others quantised: rows equal PEFT over them; what cannot work is refused in words."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, TorchAoConfig

from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings, load_settings
from lora_serve.model.base_model import load_model
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.loading import number_type
from lora_serve.model.loading.number_type import torchao_scheme
from tests.local_engine import LocalEngine
from tests.oracle import load_plain, logprobs_with_peft, save_adapter, save_tiny_model
from tests.peft_kinds import save_kind
from tests.tiers import mostly_nightly

ADAPTERS = {"rank4": {"r": 4, "lora_alpha": 8}, "rank16": {"r": 16, "lora_alpha": 8, "use_rslora": True}}
PROMPT_LENGTHS = (3, 29, 11, 1, 18, 7)
NEW_TOKENS = 6


STORED = {
    "int8": Int8WeightOnlyConfig(set_inductor_config=False),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "float8": Float8WeightOnlyConfig(set_inductor_config=False),
}


def quantised_by_transformers(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", quantization_config=TorchAoConfig(STORED[name])
    )
    return model.eval().requires_grad_(False)


def with_adapters(model: PreTrainedModel, folders: Mapping[str, Path]) -> Any:
    first, *others = folders
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle: Any = peft.PeftModel.from_pretrained(model, folders[first], adapter_name=first)
        for name in others:
            oracle.load_adapter(folders[name], adapter_name=name)
    return oracle.eval()


def build(model: Path, **settings: Any) -> ModelParts:
    given = Settings(model=str(model), max_model_len=64, **settings)
    return build_model(given.part(ModelConfig), given.part(EngineConfig), 2)


def save_quantised(model: Path, folder: Path, name: str = "int8") -> Path:
    quantised_by_transformers(model, name).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **entries: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def stored(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantised(llama, tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(
    "architecture", mostly_nightly(["llama", "qwen2", "gemma2", "phi3", "opt", "mixtral"], "qwen2", "mixtral")
)
def test_mixed_batch_on_a_quantised_base_equals_each_adapter_alone_in_peft(
    architecture: str, name: str, tmp_path: Path
) -> None:
    model = save_tiny_model(architecture, tmp_path / "model")
    folders = {
        adapter: save_adapter(model, tmp_path / adapter, seed=seed, **config)
        for seed, (adapter, config) in enumerate(ADAPTERS.items())
    }
    oracle = with_adapters(quantised_by_transformers(model, name), folders)
    engine = LocalEngine(
        save_quantised(model, tmp_path / "stored", name), folders, dtype="float32", max_num_batched_tokens=16,
        max_num_seqs=6, max_model_len=56, block_size=4, kv_cache_memory="100KiB",
    )  # fmt: skip
    assert_rows_equal(engine, oracle, list(folders), tolerance=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_kind_of_adapter_is_exact_beside_a_quantised_layer(name: str, tmp_path: Path) -> None:
    """One adapter at a time in PEFT: trained biases replace the base's own there."""
    model = save_tiny_model("qwen2", tmp_path / "model")
    kinds = ["bias_all", "save_norms", "save_lm_head", "embedding", "trainable_tokens", "ia3"]
    kinds += ["dora", "dora_with_bias"] if name == "int8" else []  # PEFT cannot read int4 weights back for its norms
    folders = {kind: save_kind(kind, "qwen2", model, tmp_path / kind) for kind in kinds}
    stored = save_quantised(model, tmp_path / "stored", name)
    engine = LocalEngine(stored, folders, dtype="float32", max_model_len=56, block_size=4, kv_cache_memory="200KiB")
    prompt = torch.randint(3, 97, (21,), generator=torch.Generator().manual_seed(3)).tolist()
    answers = engine.run([engine.request(prompt, kind, max_tokens=1, prompt_logprobs=0) for kind in kinds])
    for kind, answer in zip(kinds, answers, strict=True):
        oracle = with_adapters(quantised_by_transformers(model, name), {"one": folders[kind]})
        truth = logprobs_with_peft(oracle, "one", prompt)[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
        assert answer.prompt_logprobs is not None
        found = torch.tensor([item.logprob for item in answer.prompt_logprobs if item is not None])
        assert torch.allclose(found, truth, atol=1e-3), kind


@pytest.mark.parametrize("kind", STORED)
def test_stored_checkpoint_is_served_as_it_is(kind: str, llama: Path, tmp_path: Path) -> None:
    scheme = TorchAoConfig(STORED[kind])
    folder = tmp_path / "stored"
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, quantization_config=scheme).save_pretrained(folder)
    folders = {"rank4": save_adapter(llama, tmp_path / "rank4", **ADAPTERS["rank4"])}
    oracle = with_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folders)
    engine = LocalEngine(folder, folders, max_model_len=56, kv_cache_memory="100KiB")
    assert engine.parts.spec.num_bytes < build(llama).spec.num_bytes / 2
    assert_rows_equal(engine, oracle, list(folders), tolerance=1e-3)


def assert_rows_equal(engine: LocalEngine, oracle: Any, adapters: list[str], tolerance: float) -> None:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    names = [None, *adapters]
    rows = [(prompt, names[i % len(names)]) for i, prompt in enumerate(prompts)]
    answers = engine.run([engine.request(p, a, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2) for p, a in rows])
    assert engine.max_adapters_in_batch == len(adapters)
    for (prompt, adapter), answer in zip(rows, answers, strict=True):
        assert answer.error is None
        truth = logprobs_with_peft(oracle, adapter, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        assert answer.token_ids == truth.argmax(-1).tolist()
        found = torch.tensor([item.logprob for item in answer.logprobs if item is not None])
        assert torch.allclose(found, truth.max(-1).values, atol=tolerance)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_all_linear_layers_but_the_head_are_quantised_and_may_be_targeted(
    name: str, tied: bool, tmp_path: Path
) -> None:
    model = save_tiny_model("llama", tmp_path / "plain", tie_word_embeddings=tied)
    stored = save_quantised(model, tmp_path / "stored", name)
    loaded = load_model(Settings(model=str(stored)).part(ModelConfig))
    assert len(loaded.spec.linears) == 2 * 7 + 1
    down = loaded.spec.linears["model.layers.1.mlp.down_proj"]
    assert (down.in_features, down.out_features) == (64, 32)
    plain = {n for n in loaded.spec.linears if not number_type.is_quantized(loaded.module.get_submodule(n).weight)}
    assert plain == {"lm_head"}
    assert not number_type.is_quantized(loaded.module.get_input_embeddings().weight)


def test_bytes_told_are_those_of_the_packed_weights(llama: Path, stored: Path) -> None:
    num_weights = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
    rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    # a byte each, per row a float32 scale and an int8 zero point
    assert build(stored).spec.num_bytes == build(llama).spec.num_bytes - 4 * num_weights + num_weights + 5 * rows


def test_int4_on_a_gpu_multiplies_bfloat16_only(llama: Path) -> None:
    config = Settings(model=str(llama), quantization="int4", dtype="float16").part(ModelConfig)
    with pytest.raises(ConfigError, match=r"--dtype float16: --quantization int4 on a GPU"):
        number_type.plan_quantization(config, PretrainedConfig(), torch.device("cuda"))


def test_gpu_layout_of_int4_needs_no_further_package() -> None:
    from torchao.quantization.quantize_.workflows import Int4PackingFormat

    scheme = torchao_scheme("int4")
    assert type(scheme).__name__ == "Int4WeightOnlyConfig"
    assert scheme.int4_packing_format == Int4PackingFormat.TILE_PACKED_TO_4D


def test_weights_on_a_gpu_are_quantised_where_they_stay(llama: Path) -> None:
    config = Settings(model=str(llama), quantization="int8").part(ModelConfig)
    plan = number_type.plan_quantization(config, PretrainedConfig(), torch.device("cuda"))
    assert plan.arguments["device_map"] == {"": torch.device("cuda")}


def test_flag_that_agrees_with_the_checkpoint_is_fine(stored: Path) -> None:
    assert build(stored, quantization="int8").spec.linears


def test_flag_that_contradicts_the_checkpoint_is_refused_naming_both(stored: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization int4: .* is quantised already \(int8\)"):
        build(stored, quantization="int4")


def test_bitsandbytes_checkpoint_contradicts_a_flag_of_another_kind(llama: Path, tmp_path: Path) -> None:
    folder = edit_config(
        save_tiny_model("llama", tmp_path),
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    )
    with pytest.raises(ConfigError, match=r"--quantization int8: .*\(bitsandbytes, 4 bits\)"):
        build(folder, quantization="int8")


def test_missing_torchao_names_the_extra(llama: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_type, "is_torchao_available", lambda: False)
    config = Settings(model=str(llama), quantization="int8").part(ModelConfig)
    with pytest.raises(ConfigError, match=r"--quantization int8: needs torchao.*lora-serve\[quantization\]"):
        number_type.plan_quantization(config, PretrainedConfig(), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"quantised with torchao: needs torchao.*lora-serve\[quantization\]"):
        build(stored)


REFUSED = {
    "hqq": {"quant_method": "hqq", "bits": 4},
    "torchao Int8DynamicActivationInt8WeightConfig": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8DynamicActivationInt8WeightConfig", "_version": 2, "_data": {}}},
    },
    "torchao": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_may_mix_rows_and_unknown_ones_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = edit_config(save_tiny_model("llama", tmp_path), quantization_config=REFUSED[name])
    with pytest.raises(
        ModelError, match=rf"quantised with {name}; served are torchao's weight-only kinds, .* gptq, awq, fp8, "
    ):
        build(folder)


def test_int4_stored_for_gpus_is_refused_on_a_cpu(stored: Path, tmp_path: Path) -> None:
    kind = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 32}}
    folder = edit_config(
        save_tiny_model("llama", tmp_path),
        quantization_config={"quant_method": "torchao", "quant_type": {"default": kind}},
    )
    with pytest.raises(ModelError, match=r"layouts for GPUs only.*--quantization int4"):
        build(folder, device="cpu")


def test_quantised_checkpoint_in_an_unsafe_form_is_refused_in_words(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((stored / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot be loaded.*safetensors"):
        build(tmp_path)


def test_model_of_which_torchao_quantises_nothing_on_a_gpu_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model("gpt2", tmp_path)
    config = Settings(model=str(model), quantization="int8").part(ModelConfig)
    plan = number_type.plan_quantization(config, PretrainedConfig(), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"--quantization int8: no layer of .* can be quantised .*GPT2LMHeadModel"):
        plan.settle(load_plain(model), torch.device("cuda"))


def test_float32_products_keep_their_precision(stored: Path) -> None:
    build(stored)  # torchao would set "high", which rounds to 10 bits on GPUs
    assert torch.get_float32_matmul_precision() == "highest"


def test_unknown_quantization_is_refused_by_the_settings(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization: .*'none', 'int8', 'int4' or 'fp8'"):
        load_settings(["--model", str(llama), "--quantization", "int3"])
