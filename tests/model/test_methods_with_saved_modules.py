"""Methods other than LoRA that trained whole modules beside their own layers, in generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.local_engine import LocalEngine, refusal
from tests.oracle import load_alone, load_plain, logprobs_alone, peft_may_warn, save_tiny_model

METHODS = {
    "ia3": lambda **more: peft.IA3Config(feedforward_modules=[], **more),
    "loha": lambda **more: peft.LoHaConfig(r=3, alpha=6, **more),
}


def save(method: str, model: Path, folder: Path) -> Path:
    more: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "norm"]}
    with peft_may_warn():
        trained = peft.get_peft_model(load_plain(model), METHODS[method](task_type="CAUSAL_LM", **more))
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape) * 0.15
        trained.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_whole_modules_are_served_beside_the_method(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = save_tiny_model("llama", tmp_path / "model")
    folder = save(method, model, tmp_path / "a")
    engine = LocalEngine(model, {"a": folder})
    prompt = [5, 6, 7, 8, 9]
    mine, base = engine.run([engine.request(prompt, name, max_tokens=1, logprobs=0) for name in ("a", None)])
    for answer, plain in ((mine, load_alone(model, folder)), (base, load_plain(model))):
        expected = logprobs_alone(plain, prompt)[-1]
        (found,) = answer.logprobs
        assert found is not None
        assert answer.token_ids == [int(expected.argmax())]
        assert found.logprob == pytest.approx(expected.max().item(), abs=1e-4)


def test_module_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    file = save("ia3", model, tmp_path / "a") / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    assert "lm_head.weight is trained, but the file does not hold it" in (
        refusal(LocalEngine(model), tmp_path / "a") or ""
    )
