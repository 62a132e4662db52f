"""Reads a method other than LoRA as LoRA: exact factors where there are any, gains otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.binding.bound import BoundConversion, Conversions
from lora_serve.adapters.checkpoint.methods import GAIN_METHODS, METHODS
from lora_serve.adapters.checkpoint.methods.compression import compress
from lora_serve.adapters.checkpoint.methods.factors import Arrays, Factors
from lora_serve.adapters.checkpoint.methods.tensors import projection, to_array
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
    """None: nothing is left of this layer's delta (AdaLoRA pruned it away)."""
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
