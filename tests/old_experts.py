"""Checkpoints of mixtures of experts as PEFT saved them before transformers 5: a LoRA for every expert's every layer.

They are made of one that PEFT trained on the stacked parameters, so that what they mean does not hang on how PEFT
converts them when it loads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
# Two layers in one parameter: their ranks add up, and alpha / r stays what it was.
FUSED = {"rank_pattern": {r".*\.gate_up_proj": 2 * RANK}, "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA}}
PARTS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}  # gate, up, down
_SETTINGS = frozenset(  # what PEFT 0.13 wrote, which is of the time of transformers 4.45
    (
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "r"),
        *("rank_pattern", "revision", "target_modules", "task_type", "use_dora", "use_rslora"),
    )
)


def cut_parts_apart(model: Any) -> None:
    """Zeros in lora_B of gate_up_proj wherever one layer's rank would meet the other's outputs."""
    for name, parameter in model.named_parameters():
        if "experts.base_layer.lora_B" in name:  # [2 * inner, 2 * rank * experts]
            inner, ranks = parameter.shape[0] // 2, parameter.shape[1] // 2
            parameter.data[:inner, ranks:] = 0
            parameter.data[inner:, :ranks] = 0


def rewrite_as_old(folder: Path, model_type: str) -> None:
    """The checkpoint in `folder`, of a model that was `cut_parts_apart`, as it was saved in those days."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    old = {new: tensor for name in tensors for new, tensor in _old_tensors(name, tensors, model_type)}
    save_file({name: tensor.contiguous() for name, tensor in old.items()}, path, {"format": "pt"})
    text = json.loads((folder / "adapter_config.json").read_text())
    routers = ["gate"] if any("gate.weight" in name for name in text["target_parameters"]) else []
    text["target_modules"] = [*text["target_modules"], *PARTS[model_type], *routers]
    text |= {"rank_pattern": {}, "alpha_pattern": {}}
    kept = {name: value for name, value in text.items() if name in _SETTINGS}
    (folder / "adapter_config.json").write_text(json.dumps(kept))


def _old_tensors(name: str, tensors: dict[str, torch.Tensor], model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    block, _, rest = name.partition(".mlp.")
    old_block = f"{block}.{'block_sparse_moe' if model_type == 'mixtral' else 'mlp'}"
    gate, up, down = PARTS[model_type]
    if rest.endswith("lora_A.weight") and rest.startswith("experts."):
        parts = [gate, up] if ".base_layer." in rest else [down]
        yield from _split(f"{old_block}.experts", parts, tensors[name], tensors[name.replace("lora_A", "lora_B")])
    elif not rest.startswith("experts."):
        yield (f"{old_block}.{rest}" if rest else name), tensors[name]


def _split(old: str, parts: list[str], a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """a [experts * parts * RANK, in], b [parts * out, parts * RANK * experts]."""
    stacks_a = a.unflatten(0, (-1, len(parts), RANK))
    stacks_b = b.unflatten(1, (len(parts), RANK, -1)).unflatten(0, (len(parts), -1))
    for expert in range(len(stacks_a)):
        for i, part in enumerate(parts):
            yield f"{old}.{expert}.{part}.lora_A.weight", stacks_a[expert, i]
            yield f"{old}.{expert}.{part}.lora_B.weight", stacks_b[i, :, i, :, expert]
