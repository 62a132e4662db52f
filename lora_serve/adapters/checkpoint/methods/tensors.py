"""What the methods need of torch: saved tensors as numpy arrays, and VeRA's projection drawn again."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.methods.factors import Array
from lora_serve.adapters.checkpoint.methods.vera import VeraPlan


def to_array(tensor: Tensor) -> npt.NDArray[np.float32]:
    """An exact float32 copy of a float32, float16 or bfloat16 CPU tensor, made on this thread alone."""
    if tensor.dtype == torch.bfloat16:
        return (tensor.contiguous().view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    array: npt.NDArray[np.float32] = tensor.numpy().astype(np.float32)
    return array


def projection(plan: VeraPlan) -> dict[str, Array]:
    """vera_A [r, in_features] and vera_B [out_features, r] of an adapter saved without them, float32.

    PEFT draws them from torch's CPU generator (Mersenne Twister) seeded with `projection_prng_key`, A first, each
    Kaiming-uniform: peft/tuners/vera/model.py `_init_vera_A_vera_B`. As reproducible as torch's `uniform_` is.
    """
    generator = torch.Generator(device="cpu").manual_seed(plan.projection_prng_key)
    return {
        "vera_A": _kaiming_uniform(plan.r, plan.in_features, generator),
        "vera_B": _kaiming_uniform(plan.out_features, plan.r, generator),
    }


def _kaiming_uniform(rows: int, columns: int, generator: torch.Generator) -> Array:
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns))
    matrix: Array = torch.empty(rows, columns, dtype=torch.float32).uniform_(-bound, bound, generator=generator).numpy()
    return matrix
