"""Layers in FP8 beside fused, joined and compiled ones: a row has the same bits alone, and nothing else is computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor

from lora_serve.model.base_model import BaseModel
from lora_serve.model.fusion.compiled import decoder_layers
from lora_serve.model.loading import float8
from lora_serve.model.loading.float8 import Float8Weight
from lora_serve.model.native import operators
from tests.float8_packer import save_float8
from tests.local_engine import Answer, LocalEngine
from tests.model.fusion.test_row_alone import SHAPE, assert_rows_are_alone, save_adapters
from tests.oracle import save_tiny_model
from tests.tiers import mostly_nightly


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in FP8 on this CPU, and are multiplied by the reference."""
    monkeypatch.setattr(float8, "can_multiply", lambda layer, device: True)


@pytest.fixture(scope="module", params=mostly_nightly(("llama", "qwen3", "gemma2"), "llama"))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp(request.param)
    plain = save_tiny_model(request.param, root / "source", **SHAPE)
    return save_float8(plain, root / "model"), save_adapters(plain, root)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_has_the_same_bits_alone_and_in_company(folders: tuple[Path, dict[str, Path]], dtype: str) -> None:
    assert_rows_are_alone(folders, dtype, (64,))


@pytest.fixture(scope="module", autouse=True)
def kernels_are_kept_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path_factory.mktemp("inductor"))):
        yield


def as_on_a_gpu(folders: tuple[Path, dict[str, Path]]) -> LocalEngine:
    return LocalEngine(
        *folders, block_size=4, max_loras=4, kv_cache_memory="2MiB", lora_kernel="loop", attention="sdpa",
        fuse_layers=False, max_model_len=120, dtype="float32", enable_prefix_caching=False,
    )  # fmt: skip


def answers(engine: LocalEngine) -> list[Answer]:
    names = (None, "a", "b", "c", "a")
    sampling = {"max_tokens": 4, "ignore_eos": True, "prompt_logprobs": 0}
    return engine.run([engine.request(list(range(3, 9 + 7 * i)), name, **sampling) for i, name in enumerate(names)])


def logprobs(found: list[Answer]) -> torch.Tensor:
    items = [item for answer in found for item in answer.prompt_logprobs or ()]
    return torch.tensor([item.logprob for item in items if item is not None])


def recorded(graph: Any, given: object, dynamic_shapes: str) -> Any:
    """Stands for inductor: the operators as they were recorded, one after another."""
    return graph


@pytest.mark.parametrize("compiler", mostly_nightly(("recorded", "inductor"), "recorded"))
def test_joined_and_compiled_layers_compute_the_same(
    compiler: str, folders: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "why_not", lambda weight: "not on a GPU")
    if compiler == "recorded":
        monkeypatch.setattr(torch._inductor, "standalone_compile", recorded)
    engine = as_on_a_gpu(folders)
    base: BaseModel = engine.parts.runner._model  # type: ignore[union-attr, attr-defined]
    plain = answers(engine)
    groups = base.join()
    assert [len(group.parts) for group in groups] == [3, 2] * 2
    assert all(isinstance(group.base.weight, Float8Weight) for group in groups)
    assert answers(engine) == plain
    outcome = base.compile()
    kinds = len(set(getattr(base.module.config, "layer_types", None) or ["all alike"]))
    assert (outcome.num_layers, len(outcome.functions), dict(outcome.reasons)) == (2, kinds, {})
    for layer in decoder_layers(base.module):
        layer.forward.own = None
    compiled = answers(engine)
    assert [answer.error for answer in compiled] == [None] * len(plain)
    differences = (logprobs(compiled) - logprobs(plain)).abs()
    assert (differences < 1e-3).float().mean() > 0.95  # a number at the middle between two of FP8 may fall to either
    assert differences.max() < 0.8
