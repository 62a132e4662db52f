"""Adapters in PEFT's layout, written without PEFT, on every linear layer of a model of `make_model`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lora_serve.random_weights.model import empty_network, make_model, model_root
from lora_serve.random_weights.placing import into_place
from lora_serve.random_weights.shapes import LORA_TARGETS, RANKS

B_STD = 0.05  # a fresh adapter's B is zero; this one changes the logits, which stay finite


def make_adapters(
    cache: Path, shape: str, count: int, seed: int, ranks: Sequence[int] = RANKS, tenant: str = "bench"
) -> dict[str, Path]:
    """Makes bfloat16 adapters once; returns adapter id (`tenant/a0007`) -> folder. Ranks take turns; alpha is the
    rank.
    """
    model = make_model(cache, shape, seed)
    root = model_root(cache, shape, seed) / f"rank{'-'.join(map(str, ranks))}"
    folders = {f"{tenant}/a{index:04d}": root / f"a{index:04d}" for index in range(count)}
    missing = [(index, folder) for index, folder in enumerate(folders.values()) if not folder.exists()]
    sizes = linear_sizes(model) if missing else {}
    for index, folder in missing:
        rank, own_seed = ranks[index % len(ranks)], seed * 1_000_003 + index + 1
        into_place(folder, lambda target, rank=rank, own=own_seed: write_adapter(target, sizes, rank, own))  # type: ignore[misc]
    return folders


def write_adapter(folder: Path, sizes: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Writes one adapter. `sizes`: module path -> (out_features, in_features). A is `[rank, in]`, B `[out, rank]`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (num_out, num_in) in sizes.items():
        a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
        b = torch.randn(num_out, rank, generator=generator) * B_STD
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_config(rank), indent=2) + "\n")


def _config(rank: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bench-base",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(LORA_TARGETS),
    }


def linear_sizes(model: Path) -> dict[str, tuple[int, int]]:
    """Module path -> (out_features, in_features) of the layers that adapters of `write_adapter` change."""
    linears = ((name, part) for name, part in empty_network(model).named_modules() if isinstance(part, nn.Linear))
    return {name: (part.out_features, part.in_features) for name, part in linears if name.endswith(LORA_TARGETS)}
