"""The type of a model's numbers: what --dtype asks for, or the fastest that is as exact as the checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lora_serve.model.native import levels, library

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors names them


@dataclass(frozen=True, slots=True)
class NumberType:
    """A type, and why it was chosen."""

    dtype: torch.dtype
    reason: str


def stored_type(model: str) -> torch.dtype | None:
    """The type of most floating point numbers in a folder's safetensors; None: none are there.

    config.json may lack the type, or name another than its files hold.
    """
    sizes: Counter[torch.dtype] = Counter()
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            for part in map(stored.get_slice, stored.keys()):
                if part.get_dtype() in _STORED:
                    sizes[_STORED[part.get_dtype()]] += math.prod(part.get_shape())
    return sizes.most_common(1)[0][0] if sizes else None


def number_type(
    name: str, hf_config: Any, device: torch.device, asked: str = "as asked", stored: torch.dtype | None = None
) -> NumberType:
    """The type of weights and activations for --dtype `name`. Raises ConfigError.

    `asked`: why it is no "auto"; `stored`: the type of the checkpoint's files, where it is known.
    """
    own: torch.dtype = stored or getattr(hf_config, "dtype", None) or torch.float32
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return NumberType(chosen, asked + _slowness(chosen, device))
    if device.type != "cpu":
        return NumberType(own, "the checkpoint's own")
    if own == torch.bfloat16:
        why_not = _why_not_bfloat16(device)
        if why_not is None:
            return NumberType(own, "the checkpoint's own, which this processor multiplies faster than float32")
        return NumberType(torch.float32, f"the checkpoint is bfloat16, but {why_not}")
    if own == torch.float16:
        return NumberType(torch.float32, "the checkpoint is float16, of which bfloat16 would lose 3 bits")
    return NumberType(torch.float32, "the checkpoint's own" if own == torch.float32 else f"the checkpoint is {own}")


def _why_not_bfloat16(device: torch.device) -> str | None:
    """The reason why bfloat16 is no faster than float32 on a CPU; None: it is."""
    level = levels.current()
    if not level.multiplies_bfloat16:
        return f"kernels of level {level.name} multiply it no faster than float32"
    return library.why_not(device, torch.bfloat16)


def _slowness(dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cpu" or dtype != torch.bfloat16:
        return ""
    why_not = _why_not_bfloat16(device)
    return "" if why_not is None else f"; float32 would be as fast: {why_not}"
