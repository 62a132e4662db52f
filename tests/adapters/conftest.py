"""A tiny base model's shape, and adapter folders made for it with the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.config import AdapterConfig
from lora_serve.core.model_spec import LinearShape, ModelSpec

MakeAdapter = Callable[..., Path]
HIDDEN, INNER, LAYERS = 16, 24, 2


def _linears() -> dict[str, LinearShape]:
    table = {"lm_head": LinearShape(HIDDEN, 32)}
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            table[f"{path}.self_attn.{name}"] = LinearShape(HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            table[f"{path}.mlp.{name}"] = LinearShape(HIDDEN, INNER)
        table[f"{path}.mlp.down_proj"] = LinearShape(INNER, HIDDEN)
    return table


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    """The shape of the tiny Llama that `llama` makes."""
    return ModelSpec("tiny", "LlamaForCausalLM", 32, 64, (0,), LAYERS, _linears(), 0, "float32", "cpu")


@pytest.fixture
def config(tmp_path: Path) -> AdapterConfig:
    root = tmp_path / "root"
    root.mkdir()
    return AdapterConfig(
        store=tmp_path / "store",
        adapter_root=(root,),
        max_loras=4,
        max_lora_rank=64,
        adapter_host_memory=10**8,
        max_upload_size=10**7,
    )


@pytest.fixture
def catalog(config: AdapterConfig) -> Iterator[Catalog]:
    catalog = open_catalog(config.store)
    yield catalog
    catalog.close()


@pytest.fixture
def store(config: AdapterConfig) -> DiskStore:
    return DiskStore(config.store)


@pytest.fixture
def make_adapter(tmp_path: Path, spec: ModelSpec) -> MakeAdapter:
    """make_adapter(name, seed=, rank=, targets=, dtype=, settings=, change=) -> folder inside the allowed root.

    `settings` overrides adapter_config.json's values; `change(tensors)` edits the tensors before they are saved.
    """

    def make(
        name: str = "adapter",
        *,
        seed: int = 0,
        rank: int = 4,
        targets: tuple[str, ...] = ("q_proj", "down_proj"),
        dtype: torch.dtype = torch.float32,
        settings: Mapping[str, Any] | None = None,
        change: Callable[[dict[str, torch.Tensor]], object] | None = None,
    ) -> Path:
        folder = tmp_path / "root" / name
        folder.mkdir(parents=True)
        table = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 8,
            "target_modules": [*targets],
        }
        (folder / "adapter_config.json").write_text(json.dumps(table | dict(settings or {})))
        tensors = _tensors(spec, targets, rank, dtype, seed)
        if change is not None:
            change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def _tensors(
    spec: ModelSpec, targets: tuple[str, ...], rank: int, dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, linear in spec.linears.items():
        if path.rpartition(".")[2] in targets:
            a = torch.randn(rank, linear.in_features, generator=generator)
            b = torch.randn(linear.out_features, rank, generator=generator)
            tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(dtype)
    return tensors
