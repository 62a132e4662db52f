"""A config.json that does not fit the weights beside it is refused in words, whichever of its numbers lies."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import resolve_settings
from lora_serve.model.build import build_model
from lora_serve.text.tokenizer import TextModel
from tests.oracle import save_tiny_model
from tests.text.tiny_tokenizer import byte_level_tokenizer

LIES: list[dict[str, Any]] = [
    {"hidden_size": 64},
    {"hidden_size": 33},
    {"hidden_size": 0},
    {"hidden_size": "x"},
    {"intermediate_size": 7},
    {"num_attention_heads": 8},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 0},
    {"head_dim": 16},
    {"vocab_size": 7},
    {"vocab_size": 10**9},
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 3},
    {"model_type": "no_such"},
    {"tie_word_embeddings": "x"},
]
EXTREMES: tuple[Any, ...] = (0, -1, 10**20, "x", None)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level_tokenizer()
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("sound") / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def lying(sound: Path, tmp_path: Path, **lies: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    config = json.loads((sound / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | lies))
    return folder


def load(folder: Path) -> None:
    """As a start does."""
    flags = {"max_model_len": 32, "kv_cache_memory": "1MiB", "max_num_batched_tokens": 64, "max_num_seqs": 4}
    settings = resolve_settings({"model": str(folder), **flags})
    TextModel.load(settings.model)
    build_model(settings.part(ModelConfig), settings.part(EngineConfig), num_slots=1)


@pytest.mark.many(8)
@pytest.mark.parametrize("lies", LIES, ids=lambda lies: "-".join(f"{key}-{value}" for key, value in lies.items()))
def test_number_that_does_not_fit_the_weights_is_refused_in_words(
    sound: Path, tmp_path: Path, lies: dict[str, Any]
) -> None:
    settings = resolve_settings({"model": str(lying(sound, tmp_path, **lies))})
    with pytest.raises(ModelError) as refused:
        build_model(settings.part(ModelConfig), settings.part(EngineConfig), num_slots=1)
    said = str(refused.value)
    assert said.startswith(f"--model {settings.model}: ")
    assert "config.json" in said or "cannot be loaded" in said
    assert "\n" not in said


def test_refusal_names_a_weight_and_both_shapes(sound: Path, tmp_path: Path) -> None:
    wanted = r"config.json does not fit the weights: \S+ is \[\d+(, \d+)?\] in the weights and \[\d+(, \d+)?\] by"
    with pytest.raises(ModelError, match=wanted):
        load(lying(sound, tmp_path, hidden_size=64))


def test_layers_that_the_weights_lack_or_have_too_many_of_are_named(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"they lack model.layers.2.*others"):
        load(lying(sound, tmp_path, num_hidden_layers=3))
    with pytest.raises(ModelError, match=r"they hold model.layers.1.*more than config.json"):
        load(lying(sound, tmp_path, num_hidden_layers=1))


NUMBERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id",
)  # fmt: skip


def test_no_number_of_it_ends_in_an_error_that_is_not_drawn(sound: Path, tmp_path: Path) -> None:
    for name in NUMBERS:
        for value in EXTREMES:
            with suppress(ModelError, ConfigError):
                load(lying(sound, tmp_path, **{name: value}))


def test_end_of_text_that_no_token_can_be_is_left_out(sound: Path, tmp_path: Path) -> None:
    folder = lying(sound, tmp_path, eos_token_id=[2, -1, 10**20])
    (folder / "generation_config.json").unlink(missing_ok=True)
    settings = resolve_settings({"model": str(folder)})
    parts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), num_slots=1)
    assert parts.spec.eos_token_ids == (2,)
