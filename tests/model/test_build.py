"""What is refused at start, with the reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings
from lora_serve.model import base_model, exactness
from lora_serve.model import build as building
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.system.threads import openmp
from tests.oracle import load_plain, logprobs_alone, save_tiny_model


def build(model: Path | str, **settings: Any) -> ModelParts:
    given = Settings(model=str(model), **settings)
    return build_model(given.part(ModelConfig), given.part(EngineConfig), 2)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("mistral", tmp_path_factory.mktemp("mistral"))


def test_facts_of_the_model_are_told(mistral: Path) -> None:
    spec = build(mistral).spec
    assert spec.architecture == "MistralForCausalLM"
    assert (spec.vocab_size, spec.max_model_len, spec.num_layers, spec.eos_token_ids) == (97, 128, 2, (2,))
    shape = spec.linears["model.layers.1.mlp.down_proj"]
    assert (shape.in_features, shape.out_features) == (64, 32)
    assert len(spec.linears) == 2 * 7 + 1
    plain = AutoModelForCausalLM.from_pretrained(mistral)
    assert spec.num_bytes >= sum(parameter.nbytes for parameter in plain.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_whose_window_were_ignored_is_refused(mistral: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = base_model.create_attention

    def windowless(name: str, cache: Any) -> Any:
        attention = create(name, cache)
        return lambda *arguments: attention(*arguments[:-1], replace(arguments[-1], window=None))

    monkeypatch.setattr(base_model, "create_attention", windowless)
    with pytest.raises(ModelError, match=r"cannot be served exactly.*differ by"):
        build(mistral, dtype=dtype)


def test_deep_model_whose_own_bfloat16_is_off_by_more_than_the_tolerance_is_served(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "tie_word_embeddings": False}
    own = save_tiny_model("qwen2", tmp_path / "own", vocab_size=128, max_position_embeddings=256, **shape)
    load_plain(own, torch.bfloat16).save_pretrained(tmp_path / "model")
    (tokens, _) = exactness.probe_tokens(128)
    truth, theirs = (
        logprobs_alone(load_plain(tmp_path / "model", dtype), tokens)[:-1].gather(1, torch.tensor(tokens)[1:, None])
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert (theirs - truth).abs().max() > exactness._TOLERANCE[torch.bfloat16]
    assert build(tmp_path / "model", dtype="bfloat16").spec.dtype == "bfloat16"


def test_model_without_attention_caches_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "mamba", vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4, use_mambapy=False
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MambaForCausalLM cannot be served"):
        build(tmp_path)


def test_model_of_images_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "vit",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="ViTModel cannot be served"):
        build(tmp_path)


def test_whatever_a_models_code_raises_is_said_in_words(mistral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AttributeError("'Norm' object has no attribute 'weight'")

    monkeypatch.setattr(building, "check_exactness", fail)
    with pytest.raises(ModelError, match=rf"--model {mistral}: .*AttributeError: 'Norm' object has no attribute"):
        build(mistral)


def test_missing_model_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--model"):
        build(tmp_path / "nothing")


def test_truncated_weights_are_said_in_words(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        build(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        build(tmp_path)


def test_cache_too_small_for_one_sequence_is_refused(mistral: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory.*--max-model-len 128"):
        build(mistral, kv_cache_memory=1000)


def test_more_positions_than_the_model_has_are_refused(mistral: Path) -> None:
    with pytest.raises(ModelError, match="--max-model-len 4096"):
        build(mistral, max_model_len=4096)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_served_when_asked_for(mistral: Path, dtype: str) -> None:
    assert build(mistral, dtype=dtype).spec.dtype == dtype


def test_cuda_without_a_device_is_refused(mistral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="--device cuda"):
        build(mistral, device="cuda")


@pytest.mark.parametrize(("small", "num_cores"), [(2**30, 1), (0, 2)])
def test_small_model_is_built_on_one_core_and_the_thread_has_all_of_them_afterwards(
    small: int, num_cores: int, mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    check = building.check_exactness

    def noted(*arguments: Any, **named: Any) -> None:
        seen.append(torch.get_num_threads())
        check(*arguments, **named)

    def on_two_cores() -> None:
        torch.get_num_threads()
        runtime = openmp()
        assert runtime is not None
        runtime.omp_set_num_threads(2)
        build(mistral)
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(building, "_SMALL_MODEL", small)
    monkeypatch.setattr(building, "check_exactness", noted)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(on_two_cores).result()
    assert seen == [num_cores, 2]
