"""`lora-serve quantize`: what it prints, and what it refuses in words before it writes anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_serve.cli import main
from lora_serve.model.loading import rounded_checkpoint
from tests.float8_packer import WEIGHTS, edit_config, rewritten, save_float8
from tests.oracle import save_tiny_model

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama") / "model")


def test_it_says_what_it_did(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(model), str(tmp_path / "out")]) == 0
    words = capsys.readouterr().out
    kinds = "12 in int4 in groups of 32, 2 in int4 in groups of 64"
    assert words.startswith(f"{tmp_path / 'out'}: 14 linear layers ({kinds}), ")
    assert "74% of all weights, with an error of 9." in words
    assert set(load_file(tmp_path / "out" / WEIGHTS)) >= {f"{Q}.weight_packed", "lm_head.weight"}


def changed(change: Callable[[Tensor], Tensor], name: str = f"{Q}.weight") -> Callable[[Path, Path], Path]:
    return lambda model, folder: rewritten(model, folder, lambda own, x: {own: change(x) if own == name else x})


def without_config(model: Path, folder: Path) -> Path:
    return edit_config(save_float8(model, folder), quantization_config=None)


def in_another_form(model: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    torch.save({}, folder / "pytorch_model.bin")
    return folder


NAN = float("nan")
MODELS: dict[str, tuple[Callable[[Path, Path], Path], list[str], str]] = {
    "packed already": (save_float8, [], "it is quantised already, says its config.json"),
    "packed and its config is silent": (without_config, [], "it is quantised already: its files hold .*weight_scale"),
    "no safetensors": (in_another_form, [], "no weights in safetensors"),
    "no number": (changed(lambda x: x * NAN), [], rf"{Q}.weight: its numbers are not all finite"),
    "of another type": (changed(Tensor.double), [], rf"{Q}: its weight is F64, not F32, BF16, F16"),
    "groups that do not divide": (
        lambda model, folder: model, ["--group-size", "128"], r"layers.0.*: groups of 128 do not divide its \d+ inputs",
    ),
    "no linear layer": (
        lambda model, folder: save_tiny_model("gpt2", folder), [], r"no layer can be quantised \(GPT2LMHeadModel",
    ),
    "no model": (lambda model, folder: folder.parent, [], "config.json"),
    "no folder": (lambda model, folder: folder, [], "it is no folder, and no hub id"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_model_that_cannot_be_quantised_is_told_in_words(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, flags, words = MODELS[case]
    (tmp_path / "given").mkdir()
    folder = make(model, tmp_path / "given" / "model")
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["quantize", str(folder), str(tmp_path / "out"), *flags]) == 2
    found = capsys.readouterr().err
    assert re.search(f"^lora-serve: error: .*{words}", found, re.MULTILINE), found
    assert {path.name for path in tmp_path.iterdir()} == before


def test_place_that_cannot_be_written_is_told_in_words(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> str:
        assert main(["quantize", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    (tmp_path / "there").mkdir()
    assert "OUT: " in refused(model, tmp_path / "there")
    assert "is there already" in refused(model, tmp_path / "there")
    assert "would lie inside MODEL" in refused(model, model / "out")
    assert "is no folder" in refused(model, tmp_path / "none" / "out")
    assert "with int4 only" in refused(model, tmp_path / "out", "--to", "int8", "--group-size", "32")
    assert "invalid choice" in refused(model, tmp_path / "out", "--group-size", "48")

    monkeypatch.setattr(rounded_checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=999))
    assert "cannot be written: [Errno 28] No space left on device for 0 MiB" in refused(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
