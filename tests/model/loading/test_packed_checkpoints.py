"""Checkpoints with packed weights: the numbers are the format's, and rows equal PEFT over the dequantised base."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lora_serve.core.config import ModelConfig
from lora_serve.core.settings import Settings
from lora_serve.model.loading.frozen_model import load_frozen
from tests.oracle import load_plain, save_tiny_model
from tests.packed_place import NEAR, PackedPlace, save_adapters
from tests.tiers import mostly_nightly
from tests.weight_packer import KINDS, save_packed


def loaded(model: Path, **settings: Any) -> Any:
    config = Settings(model=str(model), **settings).part(ModelConfig)
    return load_frozen(config, AutoModelForCausalLM).module


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama") / "source")


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_adapters("llama", llama, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_format(kind: str, llama: Path, tmp_path: Path) -> None:
    packed, dequantized = save_packed(KINDS[kind], llama, tmp_path)
    found, wanted = loaded(packed, dtype="float32").state_dict(), load_plain(dequantized).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, "gptq_desc_act"))
def test_every_adapter_is_exact_over_the_dequantised_base(
    kind: str, llama: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    place = PackedPlace(*save_packed(KINDS[kind], llama, tmp_path), adapters)
    assert place.differences(place.answers()).max() < NEAR


@pytest.mark.parametrize("architecture", mostly_nightly(("qwen3_moe", "mixtral", "deepseek_v3"), "qwen3_moe"))
def test_experts_that_become_one_stack_are_packed_one_by_one(architecture: str, tmp_path: Path) -> None:
    plain = save_tiny_model(architecture, tmp_path / "source")
    packed, dequantized = save_packed(KINDS["w4a16_asymmetric"], plain, tmp_path)
    found, wanted = loaded(packed, dtype="float32").state_dict(), load_plain(dequantized).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_log_says_how_many_layers_take_the_memory_of_plain_ones(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, _ = save_packed(KINDS["awq"], llama, tmp_path)
    with caplog.at_level(logging.INFO):
        module = loaded(packed, dtype="bfloat16")
    assert "14 packed layers: awq, 4 bits, 14 are dequantised at load" in caplog.text
    assert {part.dtype for part in module.parameters()} == {torch.bfloat16}
    assert not hasattr(module.config, "quantization_config")
