"""What a start of the server leaves out, and what it does not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lora_serve.core.settings import Settings
from lora_serve.model.base_model import load_model
from lora_serve.model.loading.exactness import plain_logprobs, probe_tokens
from lora_serve.model.loading.frozen_model import SkipInit
from lora_serve.model.loading.read_ahead import read_weights
from tests.canary.house import House

DEMO = Path(__file__).parents[2] / "lora_serve/demo_data/model"

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
left = [name for name in ("torch._dynamo", "scipy", "sympy") if name in sys.modules]
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


@pytest.mark.parametrize(
    "error", [AttributeError("torch._dynamo is not imported yet"), RuntimeError("cpu and meta tensors in one product")]
)
def test_model_that_asks_for_more_than_a_lean_load_gives_is_loaded_the_ordinary_way(
    error: Exception, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []
    found = LlamaForCausalLM.from_pretrained

    def once_refused(*arguments: object, **settings: object) -> object:
        tries.append(True)
        if len(tries) == 1:
            raise error
        return found(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", once_refused)
    assert load_model(Settings(model=str(model)).model_slice()).spec.vocab_size == 64
    assert len(tries) == 2


SERVED_BESIDE = ("lora_serve.app.serving", "lora_serve.server.app", "lora_serve.server.routes", "prometheus_client")
BEFORE_THE_LOAD = """
import json, sys
import lora_serve.app.launch, lora_serve.engine_host.hosts.process, lora_serve.engine_host.hosts.thread
print(json.dumps(sorted(sys.modules)))
"""


def test_web_floor_is_not_imported_before_the_model_begins_to_load() -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE_THE_LOAD], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)).isdisjoint(SERVED_BESIDE)
    assert all(importlib.util.find_spec(name) for name in SERVED_BESIDE)


def test_reading_ahead_imports_no_torch_and_loads_its_library() -> None:
    script = """
import sys
from lora_serve.model.loading.read_ahead import load_torch_library
load_torch_library()
print("torch" in sys.modules)
import threading
[thread.join() for thread in threading.enumerate() if thread.name == "read ahead"]
print("torch" in sys.modules, "libtorch_cpu" in open("/proc/self/maps").read())
import torch
assert torch.ones(3).sum() == 3
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


def test_missing_weights_and_hub_ids_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    for name in (str(tmp_path), "org/name"):
        read_weights(name)
    for thread in threading.enumerate():
        if thread.name == "read ahead":
            thread.join()
    assert failures == []


def test_untouched_model_is_run_once_and_gives_each_sequence_what_it_gives_it_alone(model: Path) -> None:
    loaded = load_model(Settings(model=str(model)).model_slice())
    passes: list[object] = []
    loaded.module.register_forward_hook(lambda *_: passes.append(None))
    probe = probe_tokens(loaded.spec.vocab_size)
    found = plain_logprobs(loaded, probe)
    assert len(passes) == 1
    for tokens, logprobs in zip(probe, found, strict=True):
        ids = torch.tensor([tokens])
        alone = loaded.module(input_ids=ids).logits[0].float().log_softmax(-1)
        expected = alone[:-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected.detach(), atol=1e-4, rtol=1e-4)


PACKS = """
import sys
from pathlib import Path
from lora_serve.core.settings import Settings
from lora_serve.model.build import build_model
for model in sys.argv[1:]:
    settings = Settings(model=model, dtype="bfloat16", max_model_len=64, kv_cache_memory=2**20)
    parts = build_model(settings.model_slice(), settings.engine_slice(), 1)
    print(parts.spec.dtype, ".safetensors" in Path("/proc/self/maps").read_text())
"""


def test_weights_in_panels_leave_no_file_in_memory(tmp_path: Path) -> None:
    folders = {ties: tmp_path / f"{ties}" for ties in (False, True)}
    for ties, folder in folders.items():
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            tie_word_embeddings=ties,
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    done = subprocess.run(
        [sys.executable, "-c", PACKS, *map(str, folders.values())], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["bfloat16", "False"] * 2, done.stderr


def test_server_with_its_engine_on_a_thread_reads_the_tokenizer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    load = AutoTokenizer.from_pretrained

    def counted(name: str, *arguments: object, **settings: object) -> object:
        reads.append(name)
        return load(name, *arguments, **settings)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    house = House(Settings(model=str(DEMO), store=tmp_path, port=0, kv_cache_memory=2**26, max_model_len=256))
    house.start()
    house.stop()
    assert house.exit_code == 0
    assert reads == [str(DEMO)]


def test_weights_without_memory_are_not_drawn_and_others_are() -> None:
    with SkipInit():
        without = torch.nn.Linear(4, 4, device="meta")
        with_memory = torch.nn.init.normal_(torch.zeros(64))
    assert without.weight.is_meta
    assert with_memory.std() > 0.5
