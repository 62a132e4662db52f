"""`lora-serve check`: exit code, verdict, modules and probe, with no server running."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import lora_serve
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.cli import main
from lora_serve.core.settings import Settings
from tests.oracle import save_adapter, save_tiny_model

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(autouse=True)
def as_a_command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from the environment; the log that the command sets up ends with the test."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LORA_SERVE_{name.upper()}", raising=False)
    root, own = logging.getLogger(), logging.getLogger("lora_serve")
    handlers, levels = list(root.handlers), (root.level, own.level)
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def check(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[str]]:
    """Exit code and lines of the standard output."""
    code = main(["check", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Put tensors into a saved adapter, or (None) take them out."""
    tensors: dict[str, Any] = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def test_adapter_that_can_be_served_is_0_and_its_modules_and_probe_are_shown(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_adapter(
        model, tmp_path / "good", r=3, lora_alpha=6, use_dora=True, target_modules=["q_proj", "o_proj"]
    )
    code, lines = check(capsys, folder, "--model", model)
    assert code == 0
    assert lines[-1] == f"{folder}: can be served"
    rows = [line.split() for line in lines if line.startswith("model.layers.")]
    assert rows == [
        [f"model.layers.{layer}.self_attn.{name}", "lora+dora", "3", "2"]
        for layer in (0, 1)
        for name in ("o_proj", "q_proj")
    ]
    assert "kinds: use_dora" in lines
    probe = next(line for line in lines if line.startswith("probe: "))
    assert float(probe.partition("up to ")[2].partition(" ")[0]) > 0.01
    assert any(line.startswith("digest: sha256:") for line in lines)


def test_adapter_relative_to_a_changed_base_is_checked_as_it_would_be_served(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_adapter(model, tmp_path / "pissa", r=3, target_modules=["q_proj"], init_lora_weights="pissa")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, lines = check(capsys, folder, "--model", model)
    assert code == 0
    assert [line.split()[2] for line in lines if line.startswith("model.layers.")] == ["6", "6"]
    assert "converted: from pissa of rank 3 to plain LoRA of twice the rank" in lines
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert check(capsys, folder, "--model", model, "--max-lora-rank", "5")[0] == 1


def test_adapter_that_would_be_refused_is_1_with_every_reason(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_adapter(model, tmp_path / "bad", target_modules=["q_proj"])
    first, second = (f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight" for layer in (0, 1))
    change(folder, {first: None, second: torch.ones(4, 5), "base_model.model.what.weight": torch.ones(2)})
    code, lines = check(capsys, "--model", model, folder)
    assert code == 1
    assert lines[-1] == f"{folder}: {len(lines) - 1} reason(s) to reject it"
    for words in ("lora_A of model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj.lora_A", "what.weight"):
        assert any(words in line for line in lines[:-1]), (words, lines)


def test_adapter_that_changes_nothing_is_1(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_adapter(model, tmp_path / "faint", target_modules=["q_proj"])
    change(folder, {name: t * 1e-12 for name, t in load_file(folder / WEIGHTS).items() if "lora_B" in name})
    code, lines = check(capsys, folder, "--model", model)
    assert code == 1
    assert any("changes nothing" in line for line in lines)


def test_adapter_of_another_base_by_name_is_a_warning(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_adapter(model, tmp_path / "other", target_modules=["q_proj"])
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "acme/Another"}))
    code, lines = check(capsys, folder, "--model", model, "--served-model-name", "org/tiny-llama")
    assert code == 0
    assert any(line.startswith("warning: ") and "another" in line and "tiny-llama" in line for line in lines)


def test_check_of_nothing_is_2(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nowhere"), "--model", str(model)]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["check", "--model", str(model)]) == 2
    assert "ADAPTER_DIR" in capsys.readouterr().err


def test_check_without_a_usable_base_model_is_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    for arguments in (["--model", str(tmp_path / "nowhere")], ["--model", str(tmp_path / "empty")], []):
        assert main(["check", str(tmp_path), *arguments]) == 2
        assert capsys.readouterr().err.strip()


def test_own_chat_template_is_told_and_is_in_the_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(lora_serve.__file__).parent / "demo_data"
    folder, model = tmp_path / "sql", data / "model"
    shutil.copytree(data / "adapters" / "acme" / "sql", folder)
    plain = f"digest: {adapter_digest(folder)}"
    (folder / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    code, lines = check(capsys, folder, "--model", model)
    assert code == 0
    assert any(line.startswith("chat template: differs") and "admin" in line for line in lines)
    assert sum(line.startswith("digest: ") for line in lines) == 1
    assert plain not in lines
    (tmp_path / "links").mkdir()
    for file in folder.iterdir():  # as a hub's cache keeps a snapshot
        (tmp_path / "links" / file.name).symlink_to(file)
    assert check(capsys, tmp_path / "links", "--model", model)[1][:-1] == lines[:-1]
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 100000]}')
    code, ended = check(capsys, folder, "--model", model)
    assert (code, "ends its answers, too: 7 (token ids)" in ended) == (0, True)
    assert sum(line.startswith("warning: ") and "100000" in line for line in ended) == 1
    digests = [line for line in (*lines, *ended) if line.startswith("digest: ")]
    assert len({*digests}) == len(digests) == 2
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("own {{ eos_token }}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|nope|>"}')
    code, lines = check(capsys, folder, "--model", model)
    assert (code, sum(line.startswith("warning: ") and "<|nope|>" in line for line in lines)) == (0, 1)
    (folder / "chat_template.jinja").write_text("\n{{ nosuch.attr.x }}")
    code, lines = check(capsys, folder, "--model", model)
    assert (code, any("line 2: 'nosuch' is undefined" in line for line in lines)) == (1, True)
    (folder / "chat_template.jinja").write_text("{% for x in y %}")
    code, lines = check(capsys, folder, "--model", model)
    assert (code, any("chat template cannot be used: line 1" in line for line in lines)) == (1, True)


@pytest.mark.parametrize(("changes", "words"), [
    ({}, "can be served, as far as"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "do not all attend"),
    ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantised with hqq"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config.bits is 3; of gptq served is"),
    ({"architectures": ["BertModel"]}, "is a model for embed"),
])  # fmt: skip
def test_base_is_tried_by_its_config_alone(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "qwen3_next" if "layer_types" in changes else "qwen3_moe"
    config = AutoConfig.for_model(name, num_hidden_layers=2).to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = main(["check", "--base", "--model", str(tmp_path)])
    out, err = capsys.readouterr()
    assert (code, words in out + err) == (2 if changes else 0, True), out + err
    assert changes or "experts.down_proj, experts.gate_up_proj" in out


def test_either_an_adapter_or_a_base_is_checked(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["check", *own, "--model", str(model)]) for own in ([], ["--base", str(model)])] == [2, 2]
    assert capsys.readouterr().err.count("give either ADAPTER_DIR or --base") == 2
