"""Reads a method other than LoRA as LoRA: exact factors where there are any, gains otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.binding.bound import BoundConversion, Conversions
from lora_serve.adapters.checkpoint.methods import GAIN_METHODS, METHODS
from lora_serve.adapters.checkpoint.methods.compression import compress
from lora_serve.adapters.checkpoint.methods.factors import Array, Arrays, Factors
from lora_serve.adapters.checkpoint.methods.vera import VeraPlan
from lora_serve.adapters.checkpoint.weights.saved import SavedLinear
from lora_serve.core.errors import InvalidAdapterError


def convert(conversions: Conversions, read: Callable[[str], Tensor], max_rank: int | None) -> dict[str, SavedLinear]:
    """The layers by module path; factors of a rank above `max_rank` are compressed if that loses nothing.

    `read`: a tensor by its name, in the file's own dtype. Raises InvalidAdapterError with the errors at the ranks
    tried.
    """
    plan = conversions.plan
    drawn = projection(plan) if isinstance(plan, VeraPlan) and not plan.save_projection else {}
    array_of = functools.lru_cache(maxsize=4)(lambda name: to_array(read(name)))  # VeRA's layers share two tensors
    found: dict[str, SavedLinear] = {}
    reasons: list[str] = []
    for path, bound in conversions.modules.items():
        arrays: Arrays = {role: array_of(name) for role, name in bound.names.items()} | drawn
        try:
            linear = _linear(conversions, path, bound, arrays, max_rank)
        except InvalidAdapterError as error:
            reasons += error.reasons
        else:
            found |= {} if linear is None else {conversions.path_of.get(path, path): linear}
    if reasons:
        raise InvalidAdapterError(reasons)
    return found


def _linear(
    conversions: Conversions, path: str, bound: BoundConversion, arrays: Arrays, max_rank: int | None
) -> SavedLinear | None:
    """The layer; None if nothing is left of its delta (AdaLoRA pruned it away)."""
    if conversions.peft_type in GAIN_METHODS:
        gains = GAIN_METHODS[conversions.peft_type].gains(conversions.plan, path, arrays)
        vectors = [None if gain is None else torch.from_numpy(gain) for gain in (gains.input, gains.output)]
        return SavedLinear(input_gain=vectors[0], output_gain=vectors[1])
    if bound.rank == 0:
        return None
    method, shape = METHODS[conversions.peft_type], bound.shape
    factors = method.factors(conversions.plan, path, arrays, shape.in_features, shape.out_features)
    factors = factors if max_rank is None else _within(factors, max_rank, path)
    return SavedLinear(torch.from_numpy(factors.a), torch.from_numpy(factors.b), factors.scale)


def _within(factors: Factors, max_rank: int, path: str) -> Factors:
    compression = compress(factors, max_rank)
    if compression.factors is None:
        tried = "; ".join(f"rank {rank}: relative error {error:.2g}" for rank, error in compression.errors)
        raise InvalidAdapterError([f"{path} has no LoRA of --max-lora-rank {max_rank}: {compression.reason} ({tried})"])
    return compression.factors


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
