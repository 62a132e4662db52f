"""Checkpoints with packed weights: the numbers are the format's, and rows equal PEFT over the dequantised base."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from lora_serve.core.config import ModelConfig
from lora_serve.core.settings import Settings
from lora_serve.model.loading import kept_linear
from lora_serve.model.loading.frozen_model import load_frozen
from lora_serve.model.loading.number_type import quantization_of
from tests.float4_packer import four_bits, nvfp4
from tests.float8_packer import WEIGHTS, edit_config, rewritten
from tests.oracle import load_plain, save_tiny_model
from tests.packed_place import NEAR, PackedPlace, numbers_of, save_adapters
from tests.tiers import mostly_nightly
from tests.weight_packer import KINDS, save_packed, words


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
    found, wanted = numbers_of(loaded(packed, dtype="float32")), load_plain(dequantized).state_dict()
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
    found, wanted = numbers_of(loaded(packed, dtype="float32")), load_plain(dequantized).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_layers_without_a_product_of_packed_weights_are_dequantised_once(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed, dequantized = save_packed(KINDS["awq"], llama, tmp_path)
    with caplog.at_level(logging.INFO):
        by_type = loaded(packed, dtype="float16")
        monkeypatch.setattr(kept_linear, "code", lambda *_: None)
        without_room = loaded(packed, dtype="float32")
    assert caplog.text.count("0 of 14 packed linear layers stay so (awq, 4 bits); the others are dequantised") == 2
    wanted = load_plain(dequantized).state_dict()
    assert all(torch.equal(own, wanted[name].half()) for name, own in by_type.state_dict().items())
    assert all(torch.equal(own, wanted[name]) for name, own in without_room.state_dict().items())


def test_log_says_how_many_layers_stay_packed(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = save_packed(KINDS["awq"], llama, tmp_path)
    with caplog.at_level(logging.INFO):
        module = loaded(packed, dtype="bfloat16")
    assert "14 of 14 packed linear layers stay so (awq, 4 bits)" in caplog.text
    assert {part.dtype for part in module.parameters()} == {torch.bfloat16, torch.int8}
    assert not hasattr(module.config, "quantization_config")


# (bits, dimension) -> words of RECORDED_NUMBERS, as compressed-tensors 0.20.1 itself packed them.
RECORDED_NUMBERS = torch.arange(27).reshape(3, 9) * 7 + 3
RECORDED: Mapping[tuple[int, int], str] = {
    (2, 0): "0000001b 00000006 00000031 0000002c 0000001b 00000006 00000031 0000002c 0000001b",
    (2, 1): "00031b1b 0002c6c6 0001b1b1",
    (4, 0): "00000123 0000089a 00000f01 00000678 00000def 00000456 00000bcd 00000234 000009ab",
    (4, 1): "4d6f81a3 0000000b 3c5e7092 0000000a 2b4d6f81 00000009",
    (8, 0): "00814203 0088490a 008f5011 00965718 009d5e1f 00a46526 00ab6c2d 00b27334 00b97a3b",
    (8, 1): "18110a03 342d261f 0000003b 57504942 736c655e 0000007a 968f8881 b2aba49d 000000b9",
}


@pytest.mark.parametrize(("bits", "dim"), RECORDED)
def test_words_of_the_tests_packer_are_the_librarys(bits: int, dim: int) -> None:
    found = words(RECORDED_NUMBERS % (1 << bits), bits, dim).flatten().tolist()
    assert " ".join(f"{word & 0xFFFFFFFF:08x}" for word in found) == RECORDED[bits, dim]


# kind -> last name and bytes, as bitsandbytes 0.50.2 and compressed-tensors 0.20.1 themselves packed RECORDED_WEIGHT.
RECORDED_WEIGHT = (torch.arange(64).reshape(2, 32) * 7 % 41 - 20) / 16
RECORDED_BYTES: Mapping[str, tuple[str, str]] = {
    "nf4": ("weight", "0148ce0248ce0259ce0259df136adf136bef137be0148ce0248ce0259ce0259d"),
    "fp4": ("weight", "bac142baf652bde653bde653ade723ac9423ac042bac142baf652bde653bde65"),
    "nvfp4": ("weight_packed", "ef1c64ef1b65df2a75df3a76df3976de4976ce40f6ce41f6be51f7be52f7ad63"),
}


@pytest.mark.parametrize("kind", RECORDED_BYTES)
def test_bytes_of_the_tests_packer_are_the_librarys(kind: str) -> None:
    last, expected = RECORDED_BYTES[kind]
    parts = four_bits(RECORDED_WEIGHT, kind, 32)[0] if kind != "nvfp4" else nvfp4(RECORDED_WEIGHT, divides=True)[0]
    assert bytes(parts[last].flatten().tolist()).hex() == expected


@pytest.mark.parametrize("kind", ["gptq_8", "nf4"])
def test_output_head_may_be_packed_too(kind: str, tmp_path: Path) -> None:
    plain = save_tiny_model("llama", tmp_path / "source", tie_word_embeddings=False)
    packed, _ = save_packed(KINDS[kind], plain, tmp_path)
    parts, numbers = KINDS[kind].pack(load_file(plain / WEIGHTS)["lm_head.weight"][:96])
    stored = load_file(packed / WEIGHTS)
    del stored["lm_head.weight"]
    save_file(stored | {f"lm_head.{last}": part.contiguous() for last, part in parts.items()}, packed / WEIGHTS)
    edit_config(packed, vocab_size=96)
    rows = load_file(packed / WEIGHTS)["model.embed_tokens.weight"][:96].contiguous()
    save_file(load_file(packed / WEIGHTS) | {"model.embed_tokens.weight": rows}, packed / WEIGHTS, {"format": "pt"})
    assert torch.equal(numbers_of(loaded(packed, dtype="float32"))["lm_head.weight"], numbers)


def test_quantisation_may_be_said_of_the_text_alone(llama: Path, tmp_path: Path) -> None:
    packed, _ = save_packed(KINDS["awq"], llama, tmp_path)
    config = json.loads((packed / "config.json").read_text())
    stored = config.pop("quantization_config")
    found = SimpleNamespace(get_text_config=lambda: SimpleNamespace(quantization_config=stored))
    assert quantization_of(found) == stored


def test_blocks_of_fp8_are_what_transformers_makes_of_them(llama: Path, tmp_path: Path) -> None:
    packed, _ = save_packed(KINDS["fp8_blocks_that_divide"], llama, tmp_path)
    config = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32, quantization_config=config).state_dict()
    mine = numbers_of(loaded(packed, dtype="float32"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_parts_of_a_layer_may_lie_in_several_files(llama: Path, tmp_path: Path) -> None:
    packed, dequantized = save_packed(KINDS["gptq_desc_act"], llama, tmp_path)
    tensors = load_file(packed / WEIGHTS)
    names = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, packed / file, {"format": "pt"})
    (packed / WEIGHTS).unlink()
    (packed / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    found, wanted = numbers_of(loaded(packed, dtype="float32")), load_plain(dequantized).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_end_of_an_answer_is_that_of_generation_config(llama: Path, tmp_path: Path) -> None:
    packed, _ = save_packed(KINDS["awq"], llama, tmp_path)
    (packed / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert loaded(packed).generation_config.eos_token_id == [5, 7]
    (packed / "generation_config.json").unlink()
    assert loaded(packed).generation_config.eos_token_id == 2


def test_groups_of_layers_may_be_packed_in_different_ways(llama: Path, tmp_path: Path) -> None:
    kinds = {"self_attn": KINDS["w4a16_asymmetric"], "down": KINDS["w8a16"], "up": KINDS["fp8_blocks_compressed"]}
    groups = {
        part: kind.config["config_groups"]["group_0"] | {"format": kind.config["format"]}
        for part, kind in kinds.items()
    }
    config = KINDS["w4a16"].config | {"format": "mixed-precision", "config_groups": groups}
    plain, dequantized = load_file(llama / WEIGHTS), load_file(llama / WEIGHTS)
    packed = dict[str, Tensor]()
    for name, weight in plain.items():
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        if kind is None:
            packed[name] = weight
        else:
            parts, dequantized[name] = kind.pack(weight)
            packed |= {f"{name.removesuffix('weight')}{last}": part.contiguous() for last, part in parts.items()}
    model = edit_config(rewritten(llama, tmp_path / "model", lambda name, x: {}), quantization_config=config)
    save_file(packed, model / WEIGHTS, {"format": "pt"})
    found = numbers_of(loaded(model, dtype="float32"))
    assert all(torch.equal(found[name], dequantized[name]) for name in dequantized)
