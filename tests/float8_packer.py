"""Tiny checkpoints in compressed-tensors' FP8-dynamic, written by its documentation alone, and what they hold.

`RECORDED` is what compressed-tensors 0.15.0 itself wrote, so that the packer cannot err together with the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
RECORDED_WEIGHT = (
    (0.5, -1.25, 0.031, 2.0, -0.007, 0.0, 1.1, -0.6),
    (100.0, -3.0, 7.7, 0.11, -55.0, 1e-3, 20.0, -0.3),
    (1e-4, -2e-5, 3e-6, 9e-5, 0.0, -1e-4, 5e-5, 7e-7),
)
# (strategy, type of the weight) -> bytes of the numbers, scales
RECORDED: Mapping[tuple[str, torch.dtype], tuple[str, tuple[str, ...]]] = {
    ("channel", torch.float32): (
        "6ef94e7ebd0077f07ed56130f7026bbb7eeb557d00fe7645",
        ("0x1.24924a0000000p-8", "0x1.c924920000000p-3", "0x1.df595a0000000p-23"),
    ),
    ("channel", torch.bfloat16): (
        "6ef94e7ebd0077f07ed56130f7026bbb7eeb557d00fe7645",
        ("0x1.2400000000000p-8", "0x1.ca00000000000p-3", "0x1.e000000000000p-23"),
    ),
    ("tensor", torch.float32): ("41cb215190004ac37ed56130f7026bbb0080000000800000", ("0x1.c924920000000p-3",)),
    ("tensor", torch.bfloat16): ("41cb215190004ac37ed56130f7026bbb0080000000800000", ("0x1.ca00000000000p-3",)),
}
_NUMBERS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "group_size": None,
    "num_bits": 8,
    "observer_kwargs": {},
}
_NUMBERS |= {"scale_dtype": None, "symmetric": True, "type": "float", "zp_dtype": None}


def config_of(strategy: str = "channel") -> dict[str, Any]:
    """`quantization_config` as the library writes it."""
    group = {
        "format": "float-quantized",
        "input_activations": {**_NUMBERS, "dynamic": True, "observer": None, "strategy": "token"},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**_NUMBERS, "dynamic": False, "observer": "memoryless_minmax", "strategy": strategy},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.15.0",
    }


def packed(weight: Tensor, strategy: str) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> FP8 numbers, and scales of its own type: [out, 1], or [1] with "tensor"."""
    largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().reshape(1)
    scale = largest / 448
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def is_quantized(name: str) -> bool:
    """True for the linear layers of most models, but not the output head."""
    return name.endswith(("proj.weight", "proj.linear.weight"))


def save_float8(plain: Path, folder: Path, strategy: str = "channel", dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint packed from the plain one of `plain`."""

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        weight = weight.to(dtype)
        if not is_quantized(name):
            return {name: weight}
        numbers, scale = packed(weight, strategy)
        return {name: numbers, f"{name}_scale": scale}

    rewritten(plain, folder, pack)
    return edit_config(folder, quantization_config=config_of(strategy), dtype=str(dtype).removeprefix("torch."))


def save_dequantized(float8: Path, folder: Path) -> Path:
    """The plain float32 checkpoint with the very numbers of a packed one."""
    stored = load_file(float8 / WEIGHTS)

    def unpack(name: str, weight: Tensor) -> dict[str, Tensor]:
        if name.endswith("_scale"):
            return {}
        scale = stored.get(f"{name}_scale")
        return {name: weight.float() if scale is None else (weight.double() * scale.double()).float()}

    rewritten(float8, folder, unpack)
    return edit_config(folder, quantization_config=None, dtype="float32")


def rewritten(source: Path, folder: Path, rewrite: Callable[[str, Tensor], Mapping[str, Tensor]]) -> Path:
    """A copy of a checkpoint whose tensors are what `rewrite` makes of each."""
    shutil.copytree(source, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        tensors.update(rewrite(name, tensor))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


def edit_config(folder: Path, **entries: Any) -> Path:
    """Changes entries of config.json; None takes one out."""
    file = folder / "config.json"
    found = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    return folder
