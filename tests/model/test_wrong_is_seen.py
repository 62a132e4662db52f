"""The matrix's own comparison bites: host tensors that are slightly wrong are found, and only in their own rows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_serve.adapters.checkpoint.artifact import read_artifact
from tests.kind_matrix import BASE, EXACT, LIMITS, NUM_BLOCKS, Found, block_bytes, judge, mismatches
from tests.loading import load_adapter
from tests.oracle import load_fresh, save_tiny_model
from tests.peft_kinds import save_kind

KINDS = ("plain", "rslora", "layers_to_transform", "rank_1", "pissa_converted", "bfloat16")
Tamper = Callable[[Path], Path]  # a folder -> the folder whose weights the engine gets instead


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("phi3", tmp_path_factory.mktemp("phi3"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {kind: save_kind(kind, "phi3", model, tmp_path_factory.mktemp("kinds") / kind) for kind in KINDS}


def wrong_kinds(monkeypatch: pytest.MonkeyPatch, model: Path, folders: Mapping[str, Path], tamper: Tamper) -> set[str]:
    """The kinds that the matrix calls WRONG when the engine's host tensors come from tampered files."""

    def load(folder: Path, ref: Any, spec: Any) -> Any:
        other = tamper(folder)
        host = load_adapter(other, dataclasses.replace(ref, digest=read_artifact(other, spec).digest), spec)
        return dataclasses.replace(host, digest=ref.digest)

    monkeypatch.setattr("tests.local_engine.load_adapter", load)
    limits = {**LIMITS, "kv_cache_memory": str(NUM_BLOCKS * block_bytes(load_fresh(model)))}
    found = judge(model, folders, limits)
    assert set(found) == {BASE, *folders}
    assert all(verdict == EXACT or verdict.startswith("WRONG: ") for verdict in found.values())
    return {kind for kind, verdict in found.items() if verdict != EXACT}


def louder(folder: Path) -> None:
    """alpha is 2% too large."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 1.02}))


def change_tensors(folder: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: change(tensor) if part in name else tensor for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def exchange_key_and_value(folder: Path) -> None:
    """qkv_proj's rows are 32 of queries, 16 of keys, 16 of values."""
    order = torch.cat([torch.arange(32), torch.arange(48, 64), torch.arange(32, 48)])
    change_tensors(folder, "qkv_proj.lora_B", lambda tensor: tensor[order])


def exchange_gate_and_up(folder: Path) -> None:
    change_tensors(folder, "gate_up_proj.lora_B", lambda tensor: tensor.roll(64, 0))


def lose_one_module(folder: Path) -> None:
    change_tensors(folder, "layers.1.mlp.down_proj.lora_B", torch.zeros_like)


WRONGS: Mapping[str, Callable[[Path], None]] = {
    "plain": louder,
    "rank_1": exchange_key_and_value,
    "rslora": exchange_gate_and_up,
    "pissa_converted": lose_one_module,
}


def test_untouched_tensors_are_exact(monkeypatch: pytest.MonkeyPatch, model: Path, folders: Mapping[str, Path]) -> None:
    assert wrong_kinds(monkeypatch, model, folders, lambda folder: folder) == set()


def test_tampered_tensors_are_seen_in_their_own_rows_only(
    monkeypatch: pytest.MonkeyPatch, model: Path, folders: Mapping[str, Path]
) -> None:
    def tamper(folder: Path) -> Path:
        if folder.name not in WRONGS:
            return folder
        other = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}_tampered"), dirs_exist_ok=True))
        WRONGS[folder.name](other)
        return other

    assert wrong_kinds(monkeypatch, model, folders, tamper) == set(WRONGS)


def test_adapters_in_each_others_slots_are_both_seen(
    monkeypatch: pytest.MonkeyPatch, model: Path, folders: Mapping[str, Path]
) -> None:
    exchanged = {"plain": folders["rank_1"], "rank_1": folders["plain"]}
    assert wrong_kinds(monkeypatch, model, folders, lambda folder: exchanged.get(folder.name, folder)) == set(exchanged)


TRUTH = torch.tensor([[0.5, 0.3, 0.2], [0.4996, 0.0004, 0.5]]).log()


def test_comparison_takes_a_tie_and_small_noise() -> None:
    assert mismatches(Found([0, 2], [TRUTH[0, 0] + 9e-4, TRUTH[1, 2]]), TRUTH) == []
    assert mismatches(Found([0, 0], [TRUTH[0, 0], TRUTH[1, 0]]), TRUTH) == []


@pytest.mark.parametrize("logprob", [0.0, float("nan"), -0.692, -0.695])
def test_comparison_sees_a_log_probability_that_is_not_the_tokens_own(logprob: float) -> None:
    (line,) = mismatches(Found([0, 2], [logprob, TRUTH[1, 2]]), TRUTH)
    assert line.startswith("log-probability 0 is")


def test_comparison_sees_another_token() -> None:
    assert mismatches(Found([1, 2], [TRUTH[0, 1], TRUTH[1, 2]]), TRUTH) == ["token 0 is 1, PEFT's is 0 by 0.5108"]


def test_comparison_needs_an_answer_for_every_position() -> None:
    with pytest.raises(ValueError, match="zip"):
        mismatches(Found([0], [TRUTH[0, 0]]), TRUTH)
