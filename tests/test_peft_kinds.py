"""The oracle of the matrix: PEFT itself makes, saves, loads and runs every kind, and each part of it can be seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kind_matrix import Found, mismatches, prompts
from tests.models_table import build_tiny
from tests.oracle import load_alone, load_fresh, logprobs_alone, save_tiny_model
from tests.peft_kinds import (
    INVOCATION,
    KINDS,
    PEFT_FAILS,
    PEFT_LOSES,
    PeftFailsError,
    save_kind,
    save_live,
    train_kind,
    why_not,
)
from tests.peft_layers import read_layers
from tests.tiers import mostly_nightly

PROMPT = prompts(0)[-1]  # holds the trained tokens and the invocation


def models(architecture: str, folder: Path) -> dict[bool, Path]:
    return {tied: save_tiny_model(architecture, folder / f"{tied}", tie_word_embeddings=tied) for tied in (False, True)}


def applicable(architecture: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Kinds that apply, each with a model that suits it."""
    found = models(architecture, folder)
    layers = read_layers(load_fresh(found[False]))
    yield from ((name, found[bool(KINDS[name].tied)]) for name in KINDS if why_not(name, architecture, layers) is None)


@pytest.mark.parametrize("architecture", mostly_nightly(["llama", "gpt2", "qwen2", "gemma3_text", "mixtral"], "gpt2"))
def test_every_kind_changes_the_logits_and_is_read_back_as_it_was_trained(architecture: str, tmp_path: Path) -> None:
    for kind, model in applicable(architecture, tmp_path):
        seed = sum(map(ord, architecture))  # what save_kind adds to its own
        trained = logprobs_alone(train_kind(kind, model, tmp_path / f"{kind}_again", seed), PROMPT)
        saved = logprobs_alone(load_alone(model, save_kind(kind, architecture, model, tmp_path / kind)), PROMPT)
        assert (saved - logprobs_alone(load_fresh(model), PROMPT)).abs().max() > 1e-2, kind
        assert torch.allclose(saved, trained, atol=1e-4), kind


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_halving_any_kind_of_tensor_of_a_checkpoint_would_be_seen(architecture: str, tmp_path: Path) -> None:
    for kind, model in applicable(architecture, tmp_path):
        folder = save_kind(kind, architecture, model, tmp_path / kind)
        truth = logprobs_alone(load_alone(model, folder), PROMPT)
        assert mismatches(greedy(truth), truth) == []
        for part in roles(kind, folder):
            less = logprobs_alone(load_alone(model, halved(folder, part)), PROMPT)
            assert mismatches(greedy(less), truth), f"{kind}: {part} halved"


def greedy(logprobs: torch.Tensor) -> Found:
    return Found(logprobs.argmax(-1).tolist(), logprobs.max(-1).values.tolist())


def roles(kind: str, folder: Path) -> list[str]:
    """What tensors do, wherever they are.

    Left out: the copies of base weights that PEFT adds, and, where it saves what is tied once for the embedding and
    once for the head, those of the embedding: when it loads, the head's win.
    """
    names = [name for name in load_file(folder / "adapter_model.safetensors") if "base_layer.weight" not in name]
    is_double = bool(KINDS[kind].tied) and any("lm_head" in name for name in names)
    return sorted({role(name) for name in names if not (is_double and "embed_tokens" in name)})


def role(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1] in {"weight", "bias"} else parts[-1]


def halved(folder: Path, part: str) -> Path:
    """A copy of the checkpoint whose tensors of one role are halved."""
    other = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}_halved"), dirs_exist_ok=True))
    path = other / "adapter_model.safetensors"
    save_file({n: t * 0.5 if role(n) == part else t for n, t in load_file(path).items()}, path, {"format": "pt"})
    return other


@pytest.mark.parametrize(("kind", "architecture"), PEFT_FAILS)
def test_what_is_said_to_fail_in_peft_fails_there(kind: str, architecture: str, tmp_path: Path) -> None:
    model = models(architecture, tmp_path)[bool(KINDS[kind].tied)]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        logprobs_alone(train_kind(kind, model, tmp_path / "initial", seed=0), PROMPT)


@pytest.mark.parametrize("model_type", PEFT_LOSES)
def test_what_peft_is_said_to_lose_is_missing_in_its_conversion(model_type: str, tmp_path: Path) -> None:
    base = build_tiny(model_type)
    live = save_live("pissa_converted", model_type, base, tmp_path / "a")
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    num_wrong = 0
    for path, module in live.named_modules():
        if f"{path}.lora_A.weight" in saved and isinstance(module.base_layer, torch.nn.Linear):
            delta = saved[f"{path}.lora_B.weight"] @ saved[f"{path}.lora_A.weight"] * scale
            trained = module.base_layer.weight + module.get_delta_weight("default")
            own = base.get_submodule(path.removeprefix("base_model.model.")).weight + delta
            num_wrong += bool((own - trained).abs().max() > 1e-3)
    assert num_wrong > 0


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_peft_loads_no_tied_adapters_where_the_embedding_has_another_name(architecture: str, tmp_path: Path) -> None:
    model = models(architecture, tmp_path)[True]
    folder = save_kind("embedding_and_head_tied", architecture, model, tmp_path / "adapter")
    assert any("lm_head" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert not any("lm_head.lora" in name for name, _ in load_alone(model, folder).named_parameters())


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_peft_refuses_loha_and_lokr_on_conv1d(kind: str, tmp_path: Path) -> None:
    with pytest.raises(PeftFailsError, match=r"Conv1D.*not supported"):
        train_kind(kind, save_tiny_model("gpt2", tmp_path), tmp_path / "initial", seed=0)


INVOKED = [PROMPT, [30, 40, *INVOCATION], [*INVOCATION, 50, 60]]


@pytest.mark.parametrize("prompt", [*INVOKED, [30, 40, 50]])
def test_oracle_of_an_activated_adapter_is_what_generate_does(prompt: list[int], tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    oracle = load_alone(model, save_kind("activated", "llama", model, tmp_path / "adapter"))
    logprobs = generated_logprobs(oracle, prompt)
    truth = logprobs_alone(oracle, prompt, logprobs.argmax(-1).tolist())[len(prompt) - 1 : -1]
    assert torch.allclose(truth, logprobs, atol=1e-4)
    base = logprobs_alone(load_fresh(model), prompt, logprobs.argmax(-1).tolist())[len(prompt) - 1 : -1]
    assert torch.allclose(truth, base, atol=1e-4) == (prompt not in INVOKED)


def generated_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    """PEFT's own greedy loop with its cache: [8, vocab]."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return torch.cat(out.logits).log_softmax(-1)


def test_seed_decides_every_tensor_of_a_checkpoint(tmp_path: Path) -> None:
    model = save_tiny_model("qwen2", tmp_path / "model")
    first, again, other = (
        load_file(save_kind("dora", "qwen2", model, tmp_path / name, seed) / "adapter_model.safetensors")
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_converted_checkpoints_are_plain_lora_of_twice_the_rank(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    config = json.loads(
        (save_kind("pissa_converted", "llama", model, tmp_path / "x") / "adapter_config.json").read_text()
    )
    assert (config["r"], config["init_lora_weights"]) == (8, True)
