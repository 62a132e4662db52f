"""gpt-oss's experts in MXFP4, packed by the definition of the format (OCP Microscaling Formats 1.0), as transformers
and PEFT serve the numbers that they stand for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_serve.core.errors import ModelError
from tests.local_engine import LocalEngine
from tests.oracle import load_peft, logprobs_with_peft, save_adapter, save_tiny_model

VALUES = torch.tensor([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])  # of four bits
BLOCK = 32
PROMPT = [5, 9, 33, 41, 7, 64, 80, 12, 3]


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [experts, out, in] -> two numbers a byte [experts, out, in / 32, 16], exponents of their scales with 127
    added [experts, out, in / 32], and the numbers that these stand for.
    """
    blocks = weight.unflatten(-1, (-1, BLOCK))
    exponents = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2
    codes = ((blocks / 2**exponents)[..., None] - VALUES).abs().argmin(-1)
    numbers = (VALUES[codes] * 2**exponents).flatten(-2)
    nibbles = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return nibbles, (exponents[..., 0] + 127).to(torch.uint8), numbers


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """The packed checkpoint, and one of the numbers that it stands for."""
    plain = save_tiny_model("gpt_oss", tmp_path / "plain", hidden_size=64)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [one for one in tensors if one.endswith(("gate_up_proj", "down_proj"))]:  # [experts, in, out]
        nibbles, exponents, numbers = packed(tensors[name].mT)
        tensors[name] = numbers.mT.contiguous()
        del stored[name]
        stored |= {f"{name}_blocks": nibbles, f"{name}_scales": exponents}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    folder = tmp_path / "packed"
    shutil.copytree(plain, folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, plain


def test_packed_experts_are_served_as_the_numbers_they_stand_for(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder, plain = models
    adapters = {"a": save_adapter(plain, tmp_path / "a")}
    oracle, engine = load_peft(plain, adapters), LocalEngine(folder, adapters, max_model_len=64)
    rows = [None, "a"]
    answers = engine.run([engine.request(PROMPT, name, max_tokens=8, ignore_eos=True, logprobs=1) for name in rows])
    for name, answer in zip(rows, answers, strict=True):
        truth = logprobs_with_peft(oracle, name, PROMPT + answer.token_ids)[len(PROMPT) - 1 : -1]
        assert answer.token_ids == truth.argmax(-1).tolist()
        found = torch.tensor([item.logprob for item in answer.logprobs if item is not None])
        assert torch.allclose(found, truth.max(-1).values, atol=1e-3)


@pytest.mark.parametrize("lie", ["no scales", "scales that are factors", "flat blocks", "plain weights, too"])
def test_packed_experts_that_lie_are_refused(models: tuple[Path, Path], lie: str) -> None:
    file, name = models[0] / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(file)
    scales, blocks = tensors[f"{name}_scales"], tensors[f"{name}_blocks"]
    changes: dict[str, dict[str, torch.Tensor]] = {
        "no scales": {},
        "scales that are factors": {f"{name}_scales": 2.0 ** (scales.float() - 127)},
        "flat blocks": {f"{name}_scales": scales, f"{name}_blocks": blocks.flatten(-2)},
        "plain weights, too": {f"{name}_scales": scales, name: torch.zeros(4, 32, 64)},
    }
    del tensors[f"{name}_scales"]
    save_file({**tensors, **changes[lie]}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} is stored as blocks"):
        LocalEngine(models[0], max_model_len=64)
