"""sentence-transformers folders: what their files say is done, by the formulae of its documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import ModelError
from lora_serve.core.request import Task
from lora_serve.core.settings import Settings
from lora_serve.model.build import build_model
from tests.local_engine import LocalEngine
from tests.pooling_models import assert_close, hidden_alone, load_base, prompts, run, save_pooling_model

MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}


def save_modules(
    folder: Path,
    *kinds: str,
    pooling: dict[str, Any] | None = None,
    activation: str = "torch.nn.modules.activation.Tanh",
) -> Path:
    """A BERT with the modules after it: "Pooling", "Dense", "Normalize"."""
    save_pooling_model("bert", "embed", folder)
    listing = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, kind in enumerate(kinds, 1):
        path = f"{i}_{kind}"
        listing.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir()
        if kind == "Pooling":
            config = pooling if pooling is not None else {"pooling_mode_mean_tokens": True}
            (folder / path / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **config}))
        if kind == "Dense":
            torch.manual_seed(i)
            save_file(
                {"linear.weight": torch.randn(12, 32), "linear.bias": torch.randn(12)},
                folder / path / "model.safetensors",
            )
            (folder / path / "config.json").write_text(json.dumps({"activation_function": activation}))
    (folder / "modules.json").write_text(json.dumps(listing))
    return folder


def pooled_of(hidden: torch.Tensor, how: str) -> torch.Tensor:
    """https://sbert.net/docs/package_reference/sentence_transformer/modules.html, Pooling."""
    return {"cls": hidden[0], "mean": hidden.sum(0) / len(hidden), "max": hidden.max(0).values, "last": hidden[-1]}[how]


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("newer", [False, True])
def test_tokens_are_pooled_as_the_folder_says_and_left_at_their_length(how: str, newer: bool, tmp_path: Path) -> None:
    flags = {f"pooling_mode_{name}": mode == how for mode, name in MODES.items()}
    named = {"pooling_mode": "lasttoken" if how == "last" else how}
    model = save_modules(tmp_path, "Pooling", pooling=named if newer else flags)
    engine = LocalEngine(model)
    spec = engine.parts.spec.pooling
    assert spec is not None
    assert (spec.task, spec.is_normalized) == (Task.EMBED, False)
    base = load_base(model, "embed")
    expected = [pooled_of(hidden_alone(base, tokens), how) for tokens in prompts()]
    assert_close(run(engine, [(tokens, None) for tokens in prompts()]), expected)


def test_linear_layers_and_normalization_follow_in_their_order(tmp_path: Path) -> None:
    model = save_modules(tmp_path, "Pooling", "Dense", "Normalize")
    engine = LocalEngine(model)
    spec = engine.parts.spec.pooling
    assert spec is not None
    assert (spec.dimension, spec.is_normalized) == (12, True)
    torch.manual_seed(2)
    weight, bias = torch.randn(12, 32), torch.randn(12)
    base, expected = load_base(model, "embed"), []
    for tokens in prompts():
        vector = torch.tanh(weight @ hidden_alone(base, tokens).mean(0) + bias)
        expected.append(vector / vector.norm())
    assert_close(run(engine, [(tokens, None) for tokens in prompts()]), expected)


def test_longest_text_is_what_the_folder_says(tmp_path: Path) -> None:
    model = save_modules(tmp_path, "Pooling")
    (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24, "do_lower_case": False}))
    assert build(model).spec.max_model_len == 24


def build(model: Path) -> Any:
    settings = Settings(model=str(model))
    return build_model(settings.part(ModelConfig), settings.part(EngineConfig), 1)


@pytest.mark.parametrize(
    ("kinds", "more", "reason"),
    [
        (("Pooling", "LSTM"), {}, "LSTM"),
        (("Normalize",), {}, "Normalize"),
        ((), {}, "names no Pooling"),
        (("Pooling",), {"pooling": {"pooling_mode_weightedmean_tokens": True}}, "weightedmean"),
        (("Pooling",), {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}}, "max_tokens"),
        (("Pooling",), {"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt"),
        (("Pooling", "Dense"), {"activation": "torch.nn.modules.activation.Softshrink"}, "Softshrink"),
    ],
)
def test_what_is_not_understood_is_refused(kinds: Any, more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        build(save_modules(tmp_path, *kinds, **more))


def test_linear_layer_over_tokens_is_refused(tmp_path: Path) -> None:
    model = save_modules(tmp_path, "Pooling", "Dense")
    config = {"activation_function": "torch.nn.Tanh", "module_input_name": "token_embeddings"}
    (model / "2_Dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="2_Dense reads token_embeddings"):
        build(model)


def test_cross_encoder_is_a_classifier(tmp_path: Path) -> None:
    save_pooling_model("bert", "classify", tmp_path, num_labels=1)
    transformer = {
        "idx": 0,
        "name": "0",
        "path": "",
        "type": "sentence_transformers.base.modules.transformer.Transformer",
    }
    (tmp_path / "modules.json").write_text(json.dumps([transformer]))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    assert build(tmp_path).spec.pooling.task == Task.CLASSIFY


def test_linear_layer_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    model = save_modules(tmp_path, "Pooling", "Dense")
    (model / "2_Dense" / "model.safetensors").rename(model / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"2_Dense/model.safetensors is missing"):
        build(model)
