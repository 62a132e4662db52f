"""Weights of GGUF files: blocks of integers q with W = q * scale - least, where a scale, and for some kinds a `least`,
belongs to each group of a block's numbers in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.core.gguf_file import TYPES
from lora_serve.model.loading.kept_linear import Keep, kept_packed
from lora_serve.model.loading.packed_format import Part, Scheme, StoredLayer
from lora_serve.model.loading.packed_weight import CodedWeight, PackedWeight, Scales

_Block = tuple[Tensor, Tensor, Tensor | None]  # q [n, size] int8, scale [n, groups], and least, or None


def _float(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(data: Tensor, width: int) -> Tensor:
    """[n, bytes] -> the low halves of `width` bytes and their high ones, and so on: [n, 2 * bytes]."""
    pieces = data.view(len(data), -1, 1, width)
    return torch.cat((pieces & 15, pieces >> 4), 2).flatten(1)


def _bits(data: Tensor, width: int, each: int) -> Tensor:
    """[n, bytes] -> `each` bits of `width` bytes from the lowest, then the next of these bytes, and so on."""
    shifts = torch.arange(0, 8, each, dtype=torch.uint8)[:, None]
    return (data.view(len(data), -1, 1, width) >> shifts & ((1 << each) - 1)).flatten(1)


def _fifth_bits(words: Tensor) -> Tensor:
    """[n, 4] -> the 32 bits of each word from its lowest, as 16 or 0."""
    return (words[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q8_0(blocks: Tensor) -> _Block:
    return blocks[:, 2:].view(torch.int8), _float(blocks, 0), None


def _q4_0(blocks: Tensor) -> _Block:
    return _nibbles(blocks[:, 2:], 16).view(torch.int8) - 8, _float(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Block:
    return _nibbles(blocks[:, 4:], 16), _float(blocks, 0), -_float(blocks, 2)


def _q5_0(blocks: Tensor) -> _Block:
    numbers = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return numbers.view(torch.int8) - 16, _float(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Block:
    return _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]), _float(blocks, 0), -_float(blocks, 2)


def _of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and least numbers of eight groups: six bits each of bytes 4 to 15, in two halves and their rest."""
    low, middle, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), 1)
    least = torch.cat((middle & 63, rest >> 4 | middle >> 6 << 4), 1)
    return _float(blocks, 0) * scales, _float(blocks, 2) * least


def _q4_k(blocks: Tensor) -> _Block:
    return _nibbles(blocks[:, 16:], 32), *_of_k(blocks)


def _q5_k(blocks: Tensor) -> _Block:
    return _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 32, 1) << 4, *_of_k(blocks)


def _q6_k(blocks: Tensor) -> _Block:
    numbers = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 32, 2) << 4
    return numbers.view(torch.int8) - 32, _float(blocks, 208) * blocks[:, 192:208].view(torch.int8), None


_UNPACK: Mapping[str, tuple[int, Callable[[Tensor], _Block]]] = {  # bits of a number, and what takes blocks apart
    "Q8_0": (8, _q8_0), "Q4_0": (4, _q4_0), "Q4_1": (4, _q4_1), "Q5_0": (5, _q5_0), "Q5_1": (5, _q5_1),
    "Q4_K": (4, _q4_k), "Q5_K": (5, _q5_k), "Q6_K": (6, _q6_k),
}  # fmt: skip


def schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The ways in which tensors are packed."""
    return [_Blocks(kind) for kind in _UNPACK]


class _Blocks(Scheme):
    numbers = "weight"

    def __init__(self, kind: str) -> None:
        self.words, self.types = f"GGUF's {kind}", (kind,)
        self.bits, self._unpack = _UNPACK[kind]
        _, self._size, self._num_bytes = next(found for found in TYPES.values() if found[0] == kind)
        self._has_least = self._unpack(torch.zeros(1, self._num_bytes, dtype=torch.uint8))[2] is not None

    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        return {}

    def check(self, layer: StoredLayer) -> None:
        """Nothing: scales lie among the numbers."""

    def weight(self, layer: StoredLayer) -> PackedWeight | CodedWeight:
        data, size = layer.read("weight"), self.size(layer)  # [out, bytes]
        if self._has_least:
            return CodedWeight(size, lambda which: self._rows(data[which]))
        codes, scales, _ = self._unpack(data.view(-1, self._num_bytes))
        beside = Scales(scales.reshape(size[0], -1), self._size // scales.shape[1], is_signed=True)
        beside.check(self.bits)
        return PackedWeight(codes.reshape(size), beside)

    def kept(self, like: nn.Linear, device: torch.device, dtype: torch.dtype) -> Keep | None:
        return None if self._has_least else kept_packed(device, dtype)

    def _rows(self, data: Tensor) -> Tensor:
        numbers, scales, least = self._unpack(data.reshape(-1, self._num_bytes))
        assert least is not None
        found = numbers.view(*scales.shape, -1).float() * scales[..., None] - least[..., None]
        if not bool(found.isfinite().all()):
            raise ValueError("its scales have numbers that are infinite or none")
        return found.view(len(data), -1)
