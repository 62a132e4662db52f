"""What a start of the server leaves out, and what it does not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lora_serve.core.config import ModelConfig
from lora_serve.core.settings import Settings
from lora_serve.model.base_model import load_model
from lora_serve.model.exactness import plain_logprobs, probe_tokens
from lora_serve.model.loading import packed_checkpoints
from lora_serve.model.loading.checkpoint_files import SkipInit
from lora_serve.model.loading.transformers_import import READ_ALONE
from lora_serve.model.system.process import read_weights
from tests.canary.house import House

DEMO = Path(__file__).parents[2] / "lora_serve/demo_data/model"

UNNEEDED = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "scipy", "sklearn", "pandas", "matplotlib")
EXTRAS = {"redis", "ray", "opentelemetry", "matplotlib", "s3fs"}  # what not everybody installs
SERVED_BESIDE = ("lora_serve.app.serving", "lora_serve.server.app", "lora_serve.server.routes", "prometheus_client")
START = """
import json, sys, threading
from pathlib import Path
from lora_serve.model.system.process import load_torch_library
model, quantization, *packed = sys.argv[1:]
maps = lambda: Path("/proc/self/maps").read_text()
facts = {"torch_at_once": load_torch_library() or "torch" in sys.modules}
[thread.join() for thread in threading.enumerate() if thread.name == "read ahead"]
facts["torch_read_ahead"] = ["torch" in sys.modules, "libtorch_cpu" in maps()]
from lora_serve.model.loading.transformers_import import import_transformers
import_transformers(quantization, model)
import lora_serve.app.launch, lora_serve.engine_host.hosts.process, lora_serve.engine_host.hosts.thread
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.settings import Settings
from lora_serve.model.build import build_model
from lora_serve.model.base_model import load_model
facts["imported"] = sorted(sys.modules)
import torch, transformers
from transformers.utils.import_utils import is_torchao_available
if quantization == "none":
    load_model(Settings(model=model).part(ModelConfig))
facts["left"] = [name for name in ("torch._dynamo", "scipy", "sympy") if name in sys.modules]
facts["has_torchao"], facts["is_distributed"] = is_torchao_available(), torch.distributed.is_available()
import torch._dynamo, scipy.optimize
assert torch.compiler.disable(lambda: 7)() == 7
assert torch._dynamo.config.cache_size_limit > 0
with transformers.masking_utils.TransformGetItemToIndex():
    pass
facts["packed"] = []
for folder in packed:
    settings = Settings(model=folder, dtype="bfloat16", max_model_len=64, kv_cache_memory=2**20)
    parts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), 1)
    facts["packed"].append([str(parts.spec.dtype), folder in maps()])
import importlib, pkgutil, lora_serve.app.serving, lora_serve.commands, lora_serve.engine_host.service
for found in pkgutil.walk_packages(lora_serve.commands.__path__, "lora_serve.commands."):
    importlib.import_module(found.name)
facts["served"] = sorted(sys.modules)
print(json.dumps(facts))
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


@pytest.fixture(scope="module")
def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds out: most of its time goes into imports."""
    folders = {ties: tmp_path_factory.mktemp(f"packed-{ties}") for ties in (False, True)}
    for ties, folder in folders.items():
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            tie_word_embeddings=ties,
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return start(model, "none", *folders.values())


def start(model: Path, quantization: str, *packed: Path) -> dict[str, Any]:
    """Facts of a process that imports as `serve` does, and loads; `packed`: models that it builds afterwards."""
    command = [sys.executable, "-c", START, str(model), quantization, *map(str, packed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_start_imports_no_compiler_and_no_unused_package_and_hides_none_afterwards(started: dict[str, Any]) -> None:
    assert [name for name in started["imported"] if name in UNNEEDED or name.startswith("torchao")] == []
    assert started["left"] == []
    assert started["is_distributed"]


def test_neither_a_server_nor_a_command_needs_an_extra_that_it_was_not_asked_for(started: dict[str, Any]) -> None:
    assert {"lora_serve.app.serving", "lora_serve.commands.adapters"} <= set(started["served"])
    assert EXTRAS & set(started["served"]) == set()


@pytest.mark.nightly
def test_start_imports_torchao_for_its_own_checkpoints_alone(model: Path, tmp_path: Path) -> None:
    assert "torchao" not in start(model, "int8")["imported"], "on a CPU --quantization needs no package"
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "torchao"}}))
    facts = start(tmp_path, "int8")
    assert facts["has_torchao"]
    assert "torchao" in facts["imported"]


def test_what_is_read_without_a_package_is_what_there_are_readers_of() -> None:
    assert packed_checkpoints._FORMATS.keys() == READ_ALONE | {"gguf", "bitsandbytes"}


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
    assert load_model(Settings(model=str(model)).part(ModelConfig)).spec.vocab_size == 64
    assert len(tries) == 2


def test_web_floor_is_not_imported_before_the_model_begins_to_load(started: dict[str, Any]) -> None:
    assert set(started["imported"]).isdisjoint(SERVED_BESIDE)
    assert all(importlib.util.find_spec(name) for name in SERVED_BESIDE)


def test_reading_ahead_imports_no_torch_and_loads_its_library(started: dict[str, Any]) -> None:
    assert not started["torch_at_once"]
    assert started["torch_read_ahead"] == [False, True]


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
    loaded = load_model(Settings(model=str(model)).part(ModelConfig))
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


def test_weights_in_panels_leave_no_file_in_memory(started: dict[str, Any]) -> None:
    assert started["packed"] == [["bfloat16", False]] * 2


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


def test_process_without_memory_for_a_thread_ends_in_time_too() -> None:
    program = (
        "import threading, time\n"
        "from lora_serve.app.shutdown import end_within\n"
        'def refuse(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = refuse\n"
        "end_within(0.05, 7)\n"
        "time.sleep(20)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=20, check=False).returncode == 7
