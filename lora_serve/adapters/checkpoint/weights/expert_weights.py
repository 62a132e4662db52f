"""The LoRA of single experts as one low-rank delta of the parameter that holds them all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.binding.bound import BoundExperts, BoundLinear
from lora_serve.adapters.checkpoint.weights.saved import SavedDelta, SavedLinear
from lora_serve.adapters.checkpoint.weights.weights_file import bits_of


def stack_experts(bound: BoundExperts, read: Callable[[BoundLinear], SavedLinear]) -> SavedDelta:
    """The parts' ranks beside each other, and in B zeros between them:

    [W1 + B1^T A1; W2 + B2^T A2] = [W1; W2] + [B1 0; 0 B2]^T [A1; A2], where the semicolon stacks rows.

    What an expert lacks (a part that is not trained, a rank below that of others) is zero. One scale serves all: a
    part's own one is worked into its B, in float32, where it is another.
    """
    parts = [{expert: read(linear) for expert, linear in part.items()} for part in bound.parts]
    dtype = _dtype([linear for part in parts for linear in part.values()], bound.scale)
    num_out = bound.shape.out_features
    a = _zeros((bound.num_experts, bound.rank, bound.shape.in_features), dtype)
    b = _zeros((bound.num_experts, bound.rank, num_out * len(parts)), dtype)
    first_rank = 0
    for number, part in enumerate(parts):
        columns = slice(number * num_out, (number + 1) * num_out)
        for expert, linear in part.items():
            own_a, own_b = _factors(linear, bound.scale, dtype)
            rows = slice(first_rank, first_rank + len(own_a))
            bits_of(a)[expert, rows] = bits_of(own_a)
            bits_of(b)[expert, rows, columns] = bits_of(own_b)
        first_rank += max((linear.rank for linear in bound.parts[number].values()), default=0)
    return SavedDelta(a, b, bound.scale)


def _dtype(linears: Iterable[SavedLinear], scale: float) -> torch.dtype:
    dtypes = [factor.dtype for linear in linears for factor in (linear.a, linear.b) if factor is not None]
    rescaled = [torch.float32 for linear in linears if linear.scale != scale]
    return functools.reduce(torch.promote_types, [*dtypes, *rescaled])


def _factors(linear: SavedLinear, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert linear.a is not None
    assert linear.b is not None
    a, b = linear.a.to(dtype), linear.b.to(dtype)
    return a, b if linear.scale == scale else b * (linear.scale / scale)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """By numpy, which starts no threads and touches no page before it is written (see `copy_of`)."""
    return torch.from_numpy(np.zeros(shape, f"int{8 * dtype.itemsize}")).view(dtype)
