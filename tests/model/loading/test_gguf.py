"""GGUF files as the base: numbers, config, names and tokenizer are what the library wrote, and rows equal PEFT's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM

from lora_serve.core.config import ModelConfig
from lora_serve.core.settings import Settings, check_folders
from lora_serve.model.exactness import try_base
from lora_serve.model.loading.frozen_model import load_frozen, read_model_config
from lora_serve.model.loading.gguf_blocks import schemes
from lora_serve.model.loading.packed_format import StoredLayer
from lora_serve.text.tokenizer import TextModel
from tests.gguf_packer import ARCHITECTURES, WIDE, save_gguf
from tests.oracle import load_plain, save_tiny_model
from tests.packed_place import NEAR, PackedPlace, numbers_of, save_adapters
from tests.tiers import mostly_nightly

MODEL = Path(__file__).parents[3] / "lora_serve/demo_data/model"
KINDS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "F16", "BF16", "F32")
SHAPES: dict[str, dict[str, Any]] = {  # what a file does not say, as llama.cpp takes it
    "mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None}, "qwen3_moe": {"norm_topk_prob": True},
}  # fmt: skip


def part_of(model: Path, **settings: Any) -> ModelConfig:
    return Settings(model=str(model), **{"dtype": "float32", **settings}).part(ModelConfig)


def loaded(model: Path, **settings: Any) -> Any:
    return load_frozen(part_of(model, **settings), AutoModelForCausalLM).module


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama") / "source", **WIDE)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith(("16", "32"))])
def test_numbers_of_random_blocks_are_the_librarys(kind: str) -> None:
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (70, 2, num_bytes), dtype=np.uint8)
    for place in (208,) if kind == "Q6_K" else (0, 2) if "K" in kind or kind.endswith("1") else (0,):
        data[..., place : place + 2] = rng.normal(size=(70, 2, 1)).astype(np.float16).view(np.uint8)
    data = data.reshape(70, -1)
    (scheme,) = (one for one in schemes({}) if one.types == (kind,))
    layer = StoredLayer("x", {"weight": (kind, [70, 2 * size])}, lambda last: torch.from_numpy(data))
    expected = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(scheme.weight(layer).dequantized(torch.float32), expected)


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, "Q5_K", "Q6_K", "BF16"))
def test_whole_file_is_the_plain_model_of_its_numbers(kind: str, llama: Path, tmp_path: Path) -> None:
    file, dequantized = save_gguf(llama, tmp_path, kind)
    found, wanted = numbers_of(loaded(file)), load_plain(dequantized).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in wanted.items())


@pytest.mark.parametrize("architecture", mostly_nightly(ARCHITECTURES, "gemma3_text", "mixtral", "qwen3_moe"))
def test_each_family_computes_what_the_plain_model_does(architecture: str, tmp_path: Path) -> None:
    plain = save_tiny_model(architecture, tmp_path / "plain", **SHAPES.get(architecture, {}))
    file, dequantized = save_gguf(plain, tmp_path, "Q8_0")
    prompt = torch.arange(3, 90)[None]
    with torch.inference_mode():
        found, wanted = (model(prompt).logits for model in (loaded(file), load_plain(dequantized)))
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", mostly_nightly(("Q8_0", "Q4_K", "Q4_0"), "Q4_K"))
def test_every_adapter_is_exact_over_the_dequantised_base(kind: str, llama: Path, tmp_path: Path) -> None:
    file, dequantized = save_gguf(llama, tmp_path, kind)
    place = PackedPlace(file, dequantized, save_adapters("llama", llama, tmp_path / "adapters"))
    assert place.differences(place.answers()).max() < NEAR


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_scaled_positions_are_the_plain_models(rope: dict[str, Any], tmp_path: Path) -> None:
    plain = save_tiny_model("llama", tmp_path / "plain", head_dim=32, rope_parameters={"rope_theta": 500000.0, **rope})
    facts: dict[str, Any] = {}
    if rope["rope_type"] != "llama3":
        facts = {"llama.rope.scaling.type": rope["rope_type"], "llama.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        facts["llama.rope.scaling.original_context_length"] = 32
    model = load_plain(plain)
    factors = None
    if not facts:  # as llama.cpp's converter writes them: by how much each frequency is divided
        plain_ones = 500000.0 ** -(torch.arange(0, 32, 2) / 32)
        factors = (plain_ones / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    file, _ = save_gguf(plain, tmp_path, "F32", factors=factors, **facts)
    prompt = torch.arange(3, 90)[None]
    with torch.inference_mode():
        assert torch.allclose(loaded(file)(prompt).logits, model(prompt).logits, atol=1e-4)


def test_ends_of_an_answer_are_those_of_the_file(tmp_path: Path) -> None:
    file, _ = save_gguf(MODEL, tmp_path, "Q8_0")
    assert loaded(file).generation_config.eos_token_id == [2, 3]


def test_number_type_is_that_of_the_floats_and_bfloat16_of_blocks(llama: Path, tmp_path: Path) -> None:
    kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "bfloat16"}
    for kind, dtype in kinds.items():
        file, _ = save_gguf(llama, tmp_path / kind, kind)
        assert str(read_model_config(part_of(file)).dtype) == f"torch.{dtype}"


def test_tokenizer_is_that_of_the_file_or_beside_it(tmp_path: Path) -> None:
    file, _ = save_gguf(MODEL, tmp_path, "Q8_0")
    own, found = TextModel.load(str(MODEL)), TextModel.load(str(file))
    assert found.vocab_size == own.vocab_size
    assert found.special_ids == own.special_ids
    assert found.wrapper.chat_template == own.wrapper.chat_template
    for text in (
        "Hello, world! 2024 x=12345",
        " leading",
        "tabs\t\nnew",
        "ünïcödé 漢字 <|end|>",
        "don't <|endoftext|>",
        "",
    ):
        for add in (True, False):
            assert found.encode(text, add) == own.encode(text, add)
        assert found.decode(own.encode(text, False)) == own.decode(own.encode(text, False))
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(MODEL / name, tmp_path)
    assert TextModel.load(str(file)).serialized() == own.serialized()


def test_tokenizer_of_sentencepiece_adds_the_begin_and_knows_spaces(llama: Path, tmp_path: Path) -> None:
    letters = [*"abcdefgh", "\u2581", "\u2581a", "ab", "\u2581ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(0x61, 0x71)), *letters]
    kinds = [2, 3, 3, *[6] * 16, *[1] * len(letters)]
    facts = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "merges": None}
    scores = [0.0] * 19 + [-float(place) for place in range(len(letters), 0, -1)]
    facts["scores"] = scores
    file, _ = save_gguf(llama, tmp_path, "Q8_0", **{f"tokenizer.ggml.{name}": value for name, value in facts.items()})
    found = TextModel.load(str(file))
    assert [found.token(number) for number in found.encode("ab cab", True)] == ["<s>", "\u2581ab", "\u2581", "c", "ab"]
    assert found.decode(found.encode("ab cab</s>", True)) == "ab cab"
    assert found.vocab_size == len(tokens)


def test_folder_with_one_file_is_that_file(tmp_path: Path, llama: Path) -> None:
    file, dequantized = save_gguf(llama, tmp_path, "Q8_0")
    shutil.rmtree(dequantized)
    check_folders(Settings(model=str(tmp_path)))
    assert try_base(part_of(tmp_path)).spec.num_layers == 2
    assert torch.equal(loaded(tmp_path).lm_head.weight, loaded(file).lm_head.weight)
    assert Settings(model=str(file)).base_name == "model"
    assert Settings(model=str(tmp_path)).base_name == tmp_path.name
