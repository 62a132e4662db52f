"""What a start of the server leaves out, and what it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lora_serve.core.settings import Settings
from lora_serve.model.base_model import load_model
from lora_serve.model.loading.frozen_model import SkipInit

UNNEEDED = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "scipy", "sklearn", "pandas", "matplotlib")
START = """
import json, sys
from lora_serve.model.loading.transformers_import import import_transformers
import_transformers({quantization!r}, {model!r})
import lora_serve.app.launch
from lora_serve.core.settings import Settings
from lora_serve.model.base_model import load_model
imported = sorted(sys.modules)
import torch, transformers
from transformers.utils.import_utils import is_torchao_available
if {loads!r}:
    load_model(Settings(model={model!r}).model_slice())
left = [name for name in ("torch._dynamo", "scipy") if name in sys.modules]
print(json.dumps([imported, left, is_torchao_available(), torch.distributed.is_available()]))
import torch._dynamo, scipy.optimize
assert torch.compiler.disable(lambda: 7)() == 7
assert torch._dynamo.config.cache_size_limit > 0
with __import__("transformers").masking_utils.TransformGetItemToIndex():
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def start(model: Path, quantization: str = "none", *, loads: bool = False) -> tuple[list[str], list[str], bool, bool]:
    """Modules that are there after the imports of `serve`; of the heavy ones those after a load; two of the facts."""
    script = START.format(quantization=quantization, model=str(model), loads=loads)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported, left, has_torchao, is_distributed = json.loads(done.stdout.splitlines()[-1])
    return imported, left, has_torchao, is_distributed


def test_start_imports_no_compiler_and_no_unused_package_and_hides_none_afterwards(model: Path) -> None:
    imported, left, _, is_distributed = start(model, loads=True)
    assert [name for name in imported if name in UNNEEDED or name.startswith("torchao")] == []
    assert left == []
    assert is_distributed


@pytest.mark.nightly  # by day: tests/model/loading/test_quantization.py
def test_start_with_quantized_weights_finds_torchao(model: Path) -> None:
    imported, _, has_torchao, _ = start(model, "int8")
    assert has_torchao
    assert "torchao" in imported


def test_model_that_asks_for_more_of_the_compiler_is_loaded_the_ordinary_way(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []
    found = LlamaForCausalLM.from_pretrained

    def once_refused(*arguments: object, **settings: object) -> object:
        tries.append(True)
        if len(tries) == 1:
            raise AttributeError("torch._dynamo is not imported yet")
        return found(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", once_refused)
    assert load_model(Settings(model=str(model)).model_slice()).spec.vocab_size == 64
    assert len(tries) == 2


def test_weights_without_memory_are_not_drawn_and_others_are() -> None:
    with SkipInit():
        without = torch.nn.Linear(4, 4, device="meta")
        with_memory = torch.nn.init.normal_(torch.zeros(64))
    assert without.weight.is_meta
    assert with_memory.std() > 0.5
