"""What Triton compiles during warm-up is all that it compiles: later every tenant would wait for it, for seconds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.core.config import EngineConfig
from lora_serve.engine.warmup import warmup_stages
from tests.local_engine import Answer, LocalEngine
from tests.oracle import save_adapter, save_tiny_model

pytestmark = pytest.mark.gpu
RANKS = (8, 16, 40, 64, 200)
LENGTHS = (1, 7, 17, 63, 64, 65, 66, 80, 96, 100, 113, 119)  # of prompts


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The programs that Triton compiles meanwhile, none of which it knows from earlier tests."""
    triton = importlib.import_module("triton")
    names_of_modules = ("triton_programs", "triton_attention", "triton_experts")
    modules = (importlib.import_module(f"lora_serve.model.{name}") for name in names_of_modules)
    for program in (program for module in modules for program in vars(module).values()):
        if isinstance(program, triton.JITFunction):
            program.device_caches.clear()
    names: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda *, fn, key, **_: names.append(f"{fn.name} {key}")  # None: go on
    yield names
    triton.knobs.runtime.jit_cache_hook = None


@pytest.mark.parametrize("graphs", [True, False])
def test_nothing_is_compiled_after_warm_up(tmp_path: Path, compiled: list[str], graphs: bool) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    adapters = {f"r{rank}": save_adapter(model, tmp_path / f"r{rank}", seed=rank, r=rank) for rank in RANKS}
    engine = LocalEngine(
        model, adapters, device="cuda", dtype="bfloat16", cuda_graphs=graphs, max_loras=3, max_num_seqs=8,
        max_num_batched_tokens=128, kv_cache_memory="8MiB", swap_space="1MiB", adapter_memory="8MiB",
    )  # fmt: skip
    plan = warmup_stages("auto", engine.parts.spec, engine.settings.part(EngineConfig), engine.refs["r8"])
    for stage in plan:
        assert errors(engine.run(list(stage.requests))) == []
    assert any("shrink_tiles" in program for program in compiled)  # here or when the engine measured its memory
    compiled.clear()
    names = [*adapters, None]
    requests = [
        engine.request([3 + (i + j) % 50 for j in range(length)], names[(i + shift) % len(names)])
        for i, length in enumerate(LENGTHS)
        for shift in range(3)
    ]
    for request in requests[::3]:
        assert errors(engine.run([request])) == []
    assert errors(engine.run(requests[1::3] + requests[2::3])) == []
    assert compiled == []


def errors(answers: list[Answer]) -> list[str]:
    return [repr(answer.error) for answer in answers if answer.error is not None]
