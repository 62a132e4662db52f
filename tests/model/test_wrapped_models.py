"""A language model inside one that sees images, and alone: adapters under each other's names, and those that reach
beyond the text. The truth is PEFT on the model that the adapter was trained on, and on both models for one adapter.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.core.errors import InvalidAdapterError
from tests.kind_matrix import Found, mismatches
from tests.local_engine import LocalEngine
from tests.oracle import load_alone, load_plain, logprobs_alone, peft_may_warn, save_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PROMPT = [5, 9, 33, 41, 7, 64, 80, 12, 3]
NOW, ALONE, BEFORE = "model.language_model.", "model.", "language_model.model."
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PATTERNS: Mapping[str, Any] = {
    "target_modules": r".*PREFIXlayers\.\d+\.(self_attn\.(q|v)_proj|mlp\.down_proj)",
    "rank_pattern": {r"PREFIXlayers\.0\.self_attn\.q_proj": 2},
    "alpha_pattern": {r"PREFIXlayers\.1\.mlp\.down_proj": 32},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wrapper and its text model, with the same weights."""
    root = tmp_path_factory.mktemp("wrapped")
    torch.manual_seed(3)
    wrapper = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=SHAPE, vision_config=VISION, mm_tokens_per_image=4)
    )
    for parameter in wrapper.parameters():
        parameter.data = torch.randn(parameter.shape) * (0.2 if parameter.dim() > 1 else 0.1)
    wrapper.save_pretrained(root / "wrapper")
    text = Gemma3ForCausalLM(wrapper.config.text_config)
    text.model.load_state_dict(wrapper.model.language_model.state_dict())
    text.lm_head.load_state_dict(wrapper.lm_head.state_dict())
    text.save_pretrained(root / "text")
    return {"wrapper": root / "wrapper", "text": root / "text"}


def renamed(folder: Path, target: Path, old: str, new: str) -> Path:
    """The adapter as a trainer saved it whose model was named otherwise: tensors and patterns alike."""
    target.mkdir()
    tensors = load_file(folder / WEIGHTS)
    assert all(f".{old}" in name for name in tensors)
    save_file({name.replace(f".{old}", f".{new}", 1): value for name, value in tensors.items()}, target / WEIGHTS)
    text = (folder / CONFIG).read_text()
    (target / CONFIG).write_text(text.replace(json.dumps(re.escape(old))[1:-1], json.dumps(re.escape(new))[1:-1]))
    return target


def patterns(prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(PATTERNS).replace("PREFIX", json.dumps(re.escape(prefix))[1:-1]))
    return found


@pytest.fixture(scope="module")
def cases(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path, Any]]:
    """Name -> base that is served, the adapter's folder, and PEFT's model."""
    root, found = tmp_path_factory.mktemp("cases"), {}
    wrapper = save_adapter(models["wrapper"], root / "now", seed=1, **patterns(NOW))
    text = save_adapter(models["text"], root / "alone", seed=2, **patterns(ALONE))
    everything = save_adapter(models["wrapper"], root / "all", seed=4, target_modules="all-linear")
    truths = {
        folder: load_alone(model, folder)
        for folder, model in ((wrapper, models["wrapper"]), (text, models["text"]), (everything, models["wrapper"]))
    }
    for base, folder, old, new in (
        ("wrapper", wrapper, NOW, NOW), ("wrapper", wrapper, NOW, BEFORE), ("wrapper", text, ALONE, ALONE),
        ("text", text, ALONE, ALONE), ("text", wrapper, NOW, NOW), ("text", wrapper, NOW, BEFORE),
    ):  # fmt: skip
        name = f"{new} on {base}"
        own = folder if old == new else renamed(folder, root / name.replace(" ", "_"), old, new)
        found[name] = base, own, truths[folder]
    found["all-linear"] = "wrapper", everything, truths[everything]
    before = renamed(wrapper, root / "loaded", NOW, BEFORE)
    (before / CONFIG).write_text((wrapper / CONFIG).read_text())  # PEFT maps tensors, not patterns
    loaded = logprobs_alone(load_alone(models["wrapper"], before), PROMPT)
    assert torch.allclose(loaded, logprobs_alone(truths[wrapper], PROMPT))
    return found


@pytest.mark.parametrize("base", ["wrapper", "text"])
def test_adapter_acts_as_trained_whatever_its_model_was_called(
    base: str, cases: dict[str, tuple[str, Path, Any]], models: dict[str, Path]
) -> None:
    mine = {name: case for name, case in cases.items() if case[0] == base}
    engine = LocalEngine(models[base], {name: case[1] for name, case in mine.items()}, max_loras=4, block_size=4)
    requests = [engine.request(PROMPT, name, max_tokens=6, ignore_eos=True, logprobs=1) for name in mine]
    plain = load_plain(models[base])
    for (name, case), answer in zip(mine.items(), engine.run(requests), strict=True):
        found = Found(answer.token_ids, [item.logprob for item in answer.logprobs if item is not None])
        truth, without = (logprobs_alone(m, PROMPT, answer.token_ids)[len(PROMPT) - 1 : -1] for m in (case[2], plain))
        assert mismatches(found, truth) == [], name
        assert mismatches(found, without), name


def test_tensors_that_text_never_meets_are_left_out_in_words_and_text_modules_never_are(
    cases: dict[str, tuple[str, Path, Any]], models: dict[str, Path], tmp_path: Path
) -> None:
    spec = LocalEngine(models["wrapper"]).parts.spec
    assert [*spec.unmet] == ["model.vision_tower", "model.multi_modal_projector"]
    folder = cases["all-linear"][1]
    sentence = read_artifact(folder, spec).left_out
    assert "tensors of model.vision_tower, which no text runs through" in sentence
    assert sentence.endswith("not zero.")
    assert sentence.startswith(f"{sum('vision_tower' in name for name in load_file(folder / WEIGHTS))} ")

    def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
        shutil.copytree(folder, tmp_path / "changed", dirs_exist_ok=True)
        save_file(change(load_file(folder / WEIGHTS)), tmp_path / "changed" / WEIGHTS)
        return tmp_path / "changed"

    untrained = changed(lambda all_: {n: t * 0 + 0 if "vision" in n and "lora_B" in n else t for n, t in all_.items()})
    assert "all zero" in read_artifact(untrained, spec).left_out
    nothing = changed(lambda all_: {n: t for n, t in all_.items() if "vision" in n})
    with pytest.raises(InvalidAdapterError, match="no weights"):
        read_artifact(nothing, spec)
    mixed = changed(lambda all_: {n.replace("language_model.layers.0", "layers.0"): t for n, t in all_.items()})
    with pytest.raises(InvalidAdapterError, match="belongs to no module"):
        read_artifact(mixed, spec)


def test_vera_whose_matrices_a_vision_tower_shares_needs_them_saved(models: dict[str, Path], tmp_path: Path) -> None:
    spec = LocalEngine(models["wrapper"]).parts.spec
    for is_saved in (True, False):
        linears = ["q_proj", "down_proj", "fc1"]  # fc1 is the tower's
        with peft_may_warn():
            config = peft.VeraConfig(r=4, target_modules=linears, save_projection=is_saved, task_type="CAUSAL_LM")
            peft.get_peft_model(load_plain(models["wrapper"]), config).save_pretrained(tmp_path / str(is_saved))
    assert read_artifact(tmp_path / "True", spec).bound.conversions is not None
    with pytest.raises(InvalidAdapterError, match="had a part in their shapes"):
        read_artifact(tmp_path / "False", spec)
