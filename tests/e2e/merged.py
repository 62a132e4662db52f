"""A cheap oracle for many adapters: transformers alone, with W + scale * B A written into its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

PREFIX = "base_model.model."


def save_sibling(template: Path, folder: Path, seed: int) -> Path:
    """An adapter with the template's configuration and other random weights."""
    folder.mkdir(parents=True)
    shutil.copy(template / "adapter_config.json", folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(template / "adapter_model.safetensors")
    save_file(
        {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, folder: Path | None, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """`count` greedy tokens for prompts of one length, with the adapter merged into the weights meanwhile."""
    with merged_into(model, folder):
        ids = torch.tensor([list(prompt) for prompt in prompts])
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return [row[-count:] for row in ids.tolist()]


@contextmanager
def merged_into(model: PreTrainedModel, folder: Path | None) -> Iterator[None]:
    deltas = {} if folder is None else _deltas(folder)
    for name, delta in deltas.items():
        model.get_submodule(name).weight.data += delta
    try:
        yield
    finally:
        for name, delta in deltas.items():
            model.get_submodule(name).weight.data -= delta


def _deltas(folder: Path) -> Mapping[str, torch.Tensor]:
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    names = {name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name}
    return {
        name: scale * tensors[f"{PREFIX}{name}.lora_B.weight"] @ tensors[f"{PREFIX}{name}.lora_A.weight"]
        for name in names
    }
