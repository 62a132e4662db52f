"""The adapter of each packed token, in the form that programs on the device read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.core.batch import BASE_SLOT
from lora_serve.model.system.transfer import to_device

SHORT_SEGMENT = 32  # tokens; longer ones are tiles. As measured on a CPU: not tuned on a GPU yet
TILE_TOKENS = 64  # of one matrix product of a long segment


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """`LoraTokens` on a device: tokens of short segments by themselves, long segments as tiles of tokens.

    A tile is [first token, number of tokens, slot]. No tensor's size depends on the number of segments, so that a
    captured graph reads the same tensors in every step.
    """

    slots: Tensor  # [num_tokens] integers: the slot of tokens in short segments, -1 elsewhere
    scales: Tensor  # [num_tokens] float32
    tiles: Tensor  # [num_tiles, 3] integers
    tile_scales: Tensor  # [num_tiles] float32
    has_short: bool

    @staticmethod
    def of(num_tokens: int, segments: Sequence[tuple[int, int, int, float]], device: torch.device) -> DeviceTokens:
        """`segments`: start, end, slot and scale of each; other tokens have no adapter. One copy."""
        slots, ones = torch.full((num_tokens,), BASE_SLOT, dtype=torch.int32), torch.ones(num_tokens)
        long = [segment for segment in segments if segment[1] - segment[0] > SHORT_SEGMENT]
        for start, end, slot, scale in segments:
            if end - start <= SHORT_SEGMENT:
                slots[start:end], ones[start:end] = slot, scale
        tiles = [
            (first, min(TILE_TOKENS, end - first), slot, scale)
            for start, end, slot, scale in long
            for first in range(start, end, TILE_TOKENS)
        ]
        numbers = torch.tensor([tile[3] for tile in tiles], dtype=torch.float32)
        places = torch.tensor([tile[:3] for tile in tiles], dtype=torch.int32).reshape(-1)
        host = torch.cat([slots, ones.view(torch.int32), places, numbers.view(torch.int32)])
        moved = to_device(host, torch.int32, device)
        parts = torch.split(moved, [len(slots), len(slots), 3 * len(tiles), len(tiles)])
        return DeviceTokens(
            parts[0],
            parts[1].view(torch.float32),
            parts[2].view(-1, 3),
            parts[3].view(torch.float32),
            has_short=bool((slots >= 0).any()),
        )

    @staticmethod
    def of_rows(slots: Tensor, scales: Tensor) -> DeviceTokens:
        """One token per row, from buffers that stay in place: `slots` [rows] integers, `scales` [rows] float32."""
        no_tiles = torch.zeros(0, 3, dtype=torch.int32, device=slots.device)
        return DeviceTokens(slots, scales, no_tiles, scales[:0], has_short=True)
