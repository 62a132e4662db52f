"""Rounds a weight as compressed-tensors packs it: to integers of 4 bits in groups, to 8 bits or FP8 by output.

W[o, i] is about codes[o, i] * scale[o, g]. Of a few scales the one with the least squared error of its group is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lora_serve.model.loading.number_type import FLOAT8
from lora_serve.model.loading.packed_weight import packed

VERSION = 1  # of this rule: what was made by another is made anew
GROUP_SIZES = (128, 64, 32)  # of int4: the first that divides a layer's inputs
_AT_ONCE = 2**18  # numbers, so that their float32 stays in the caches
_LARGEST = torch.finfo(FLOAT8).max
_FIELDS: Mapping[str, Any] = {"symmetric": True, "actorder": None, "block_structure": None, "observer_kwargs": {}}
# What the largest number of a group becomes, by a scale of 1, and shares of that scale to be tried: integers may lose
# their ends, and FP8 falls on its steps in another way.
_TRIED: Mapping[str, tuple[float, tuple[float, ...]]] = {
    "int4": (7.5, (1.0, 0.93, 0.86, 0.79, 0.72)),
    "int8": (127.5, (1.0,)),  # of 256 steps none is worth an end
    "fp8": (_LARGEST, (1.0, 2**0.25, 2**0.5, 2**0.75)),
}
KINDS = tuple(_TRIED)


@dataclass(frozen=True, slots=True)
class Rounding:
    """One way to round weights."""

    kind: str  # of KINDS
    group_size: int | None = None  # inputs that share a scale; None: all of an output

    @classmethod
    def of(cls, kind: str, num_inputs: int, group_size: int | None = None) -> Self | None:
        """The way for a layer; None: no group divides its inputs. `group_size`: as asked. Raises ValueError if that one
        does not.
        """
        if kind != "int4":
            return cls(kind)
        if group_size is not None and num_inputs % group_size:
            raise ValueError(f"groups of {group_size} do not divide its {num_inputs} inputs")
        sizes = GROUP_SIZES if group_size is None else (group_size,)
        found = next((size for size in sizes if num_inputs % size == 0), None)
        return None if found is None else cls(kind, found)

    def __str__(self) -> str:
        return self.kind if self.group_size is None else f"{self.kind} in groups of {self.group_size}"

    @property
    def form(self) -> str:
        """The name of the format within compressed-tensors."""
        return "float-quantized" if self.kind == "fp8" else "pack-quantized"

    def config_group(self, targets: Sequence[str]) -> dict[str, Any]:
        """The group of such layers in config.json."""
        is_float = self.kind == "fp8"
        numbers = {**_FIELDS, "num_bits": self._bits, "type": "float" if is_float else "int", "group_size": None}
        inputs = {**numbers, "strategy": "token", "dynamic": True, "observer": None} if is_float else None
        strategy = "channel" if self.group_size is None else "group"
        numbers |= {"strategy": strategy, "group_size": self.group_size, "dynamic": False, "observer": "mse"}
        beside = {"input_activations": inputs, "output_activations": None, "format": self.form}
        return {"targets": list(targets), "weights": numbers, **beside}

    def forms(self, size: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[torch.dtype, list[int]]]:
        """The tensors that stand for a weight [out, in] of a type, by their last names."""
        num_outputs, num_inputs = size
        beside = [num_outputs, num_inputs // (self.group_size or num_inputs)]
        if self.kind == "fp8":
            return {"weight": (FLOAT8, [*size]), "weight_scale": (torch.float32, beside)}
        words = -(-num_inputs * self._bits // 32)
        return {
            "weight_packed": (torch.int32, [num_outputs, words]),
            "weight_scale": (dtype, beside),
            "weight_shape": (torch.int64, [2]),
        }

    def tensors(self, weight: Tensor) -> tuple[dict[str, Tensor], float, float]:
        """A weight [out, in] as `forms` says, the squares of its errors and its own, summed. Raises ValueError."""
        rows = max(1, _AT_ONCE // weight.shape[1])
        parts = [self._rounded(weight[start : start + rows]) for start in range(0, len(weight), rows)]
        codes, scales = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        errors, squares = sum(part[2] for part in parts), sum(part[3] for part in parts)
        if self.kind == "fp8":
            return {"weight": codes, "weight_scale": scales}, errors, squares
        shape = torch.tensor(weight.shape)
        words = packed(codes.to(torch.int8), self._bits)
        return {"weight_packed": words, "weight_scale": scales, "weight_shape": shape}, errors, squares

    def _rounded(self, weight: Tensor) -> tuple[Tensor, Tensor, float, float]:
        """Codes and scales of some rows; squares of errors and of the weight."""
        dtype = torch.float32 if self.kind == "fp8" else weight.dtype
        numbers = weight.float().view(len(weight), -1, self.group_size or weight.shape[1])
        largest = numbers.abs().amax(-1, keepdim=True)
        if not bool(largest.isfinite().all()):
            raise ValueError("its numbers are not all finite")
        top, tried = _TRIED[self.kind]
        best, least = largest, torch.full_like(largest, torch.inf)
        for share in tried:
            scales = (largest * (share / top)).to(dtype).float()
            scales.masked_fill_(scales == 0, 1)  # of zeros, or of what is too small for the type
            errors = (self._codes(numbers, scales).float().mul_(scales) - numbers).square_().sum(-1, keepdim=True)
            best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
        codes = self._codes(numbers, best).view(weight.shape)
        return codes, best[..., 0].to(dtype), float(least.sum()), float(numbers.square().sum())

    def _codes(self, numbers: Tensor, scales: Tensor) -> Tensor:
        found = numbers / scales
        if self.kind == "fp8":
            return found.clamp_(-_LARGEST, _LARGEST).to(FLOAT8)
        half = 1 << (self._bits - 1)
        return found.round_().clamp_(-half, half - 1)

    @property
    def _bits(self) -> int:
        return 4 if self.kind == "int4" else 8
