"""What `--quantization` made at one start is read at the next, and nothing that goes wrong on the disk is silent."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings
from lora_serve.model.loading import rounded_checkpoint, rounded_once
from lora_serve.model.loading.frozen_model import load_frozen
from lora_serve.model.loading.rounded_checkpoint import PlainCheckpoint
from tests.float8_packer import WEIGHTS, rewritten
from tests.oracle import save_tiny_model
from tests.packed_place import numbers_of


def load(model: Path, kind: str = "int4") -> dict[str, Tensor]:
    config = Settings(model=str(model), dtype="float32", quantization=kind).part(ModelConfig)
    found = numbers_of(load_frozen(config, AutoModelForCausalLM).module)
    return {name: tensor.clone() for name, tensor in found.items()}  # some are views of files that tests cut off


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints that are written, in order."""
    found, write = list[Path](), PlainCheckpoint.write

    def noted(self: PlainCheckpoint, out: Path) -> Any:
        found.append(out)
        return write(self, out)

    monkeypatch.setattr(PlainCheckpoint, "write", noted)
    return found


def kept(cache: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in cache.iterdir() if path.suffix != ".lock")


def test_second_start_does_not_read_the_plain_weights(
    model: Path, cache: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_once, "_NUM_PAGES", 1)
    before = load(model)
    file, facts = model / WEIGHTS, (model / WEIGHTS).stat()
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little") + 4096  # behind the only page that is looked at
    file.write_bytes(content[:start] + bytes(len(content) - start))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert are_equal(load(model), before)
    assert len(made) == 1
    assert kept(cache) == ["int4"]


def test_other_weights_and_kinds_are_other_checkpoints(model: Path, cache: Path, made: list[Path]) -> None:
    before = load(model)
    load(model, "int8")
    facts = (model / WEIGHTS).stat()
    tensors = load_file(model / WEIGHTS)
    tensors["model.layers.0.mlp.up_proj.weight"][5] *= 2
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    os.utime(model / WEIGHTS, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # the size is the same, too
    assert not are_equal(load(model), before)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    load(model)
    assert len(made) == len(set(made)) == 4
    assert kept(cache) == ["int4", "int4", "int4", "int8"]


@pytest.mark.parametrize(
    "damage", [lambda file: os.truncate(file, 5000), Path.unlink, lambda file: file.write_text("")]
)
def test_file_that_is_cut_off_or_gone_is_made_anew(
    damage: Callable[[Path], None], model: Path, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    before = load(model)
    damage(made[0] / WEIGHTS)
    assert are_equal(load(model), before)
    assert "is made anew, as it cannot be read" in caplog.text
    assert len(made) == 2


def test_damaged_numbers_are_told_with_the_folder_to_delete(model: Path, made: list[Path]) -> None:
    load(model)
    (made[0] / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"rounded into {made[0]}, which is damaged now: delete that"):
        load(model)


def test_what_a_killed_start_left_is_cleared_away(model: Path, cache: Path, made: list[Path]) -> None:
    load(model)
    left = cache / f".{made[0].name}-x1"
    (left / "deep").mkdir(parents=True)
    os.truncate(made[0] / WEIGHTS, 1)
    load(model)
    assert not left.exists()


def test_two_starts_at_once_make_it_once(
    model: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    waits, write = threading.Event(), PlainCheckpoint.write

    def slowly(self: PlainCheckpoint, out: Path) -> Any:
        waits.wait(30)
        return write(self, out)

    monkeypatch.setattr(PlainCheckpoint, "write", slowly)
    config = Settings(model=str(model), quantization="int8").part(ModelConfig)
    hf_config, found = AutoModelForCausalLM.from_pretrained(model).config, list[Path]()

    def start() -> None:
        found.append(rounded_once.rounded_once(config, hf_config, AutoModelForCausalLM, ExitStack()))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    while "another start is rounding this model; waiting" not in caplog.text:
        assert any(thread.is_alive() for thread in threads)
    waits.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found[0] == found[1]
    assert (found[0] / WEIGHTS).is_file()


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_cache_that_cannot_be_used_is_told_and_not_needed(
    model: Path, cache: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = load(model)
    monkeypatch.setattr(rounded_once, "cache_folder", refuse)
    assert are_equal(load(model), before)
    assert "nothing is kept for the next start (XDG_CACHE_HOME chooses another folder)" in caplog.text
    assert not made[1].exists()
    assert made[1].parent != cache


def test_full_disk_is_told_in_words_and_leaves_nothing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=999))
    with pytest.raises(ConfigError, match=r"--quantization int4: it cannot be written anywhere: .*No space.*TMPDIR"):
        load(model)
    assert kept(cache) == []


def test_weights_that_cannot_be_rounded_are_told_and_nothing_is_kept(model: Path, cache: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(found: str, tensor: Tensor) -> dict[str, Tensor]:
        return {found: tensor / 0 if found == name else tensor}

    lying = rewritten(model, tmp_path / "lying", spoil)
    with pytest.raises(ModelError, match=rf"--model .*lying: {name}: its numbers are not all finite"):
        load(lying)
    assert kept(cache) == []
    os.truncate(lying / WEIGHTS, 5000)
    with pytest.raises(ModelError, match=r"--model .*lying: cannot be loaded: .*metadata"):
        load(lying)
    (lying / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"--model .*lying: its weights cannot be read"):
        load(lying)


def test_model_without_a_layer_to_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization int4: .*: no layer can be quantised \(GPT2LMHeadModel"):
        load(save_tiny_model("gpt2", tmp_path / "gpt2"))
