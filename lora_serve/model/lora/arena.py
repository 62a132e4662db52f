"""All of an adapter's low-rank tensors in one piece of memory, so that a copy, a read or a hash is one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta, SlotColumns

ALIGNMENT = 64  # bytes: a cache line


def in_arena(adapter: HostAdapter, linears: Iterable[str], *, pin: bool) -> HostAdapter:
    """The same adapter with its linear layers' tensors in one arena. `pin`: in memory that a GPU reads by itself.

    `linears`: every linear layer of the base, as in ModelSpec. Pinning was not run on a GPU yet.
    """
    places = list(_tensors(adapter.deltas.values()))
    offsets, num_bytes = laid_out(places)
    arena = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
    for tensor, offset in zip(places, offsets, strict=True):
        arena.numpy()[offset : offset + tensor.nbytes] = bytes_of(tensor)
    views = iter([_view(arena, tensor, offset) for tensor, offset in zip(places, offsets, strict=True)])
    deltas = {path: _with_tensors(delta, views) for path, delta in adapter.deltas.items()}
    columns = SlotColumns.of([deltas.get(path) for path in linears])
    return dataclasses.replace(adapter, deltas=deltas, columns=columns, arena=arena)


def laid_out(tensors: Iterable[Tensor], start: int = 0) -> tuple[list[int], int]:
    """The offset of each, aligned, one after another from `start` on; and where the last ends, aligned."""
    offsets, position = [], aligned(start)
    for tensor in tensors:
        offsets.append(position)
        position = aligned(position + tensor.nbytes)
    return offsets, position


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: Tensor) -> Any:
    """A contiguous tensor's memory as a flat numpy array of bytes; nothing is copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def moved_deltas(deltas: Sequence[LinearDelta | None], arena: Tensor, device: torch.device) -> list[LinearDelta | None]:
    """`deltas`, whose tensors lie in `arena`, in a copy of it on `device`, which may still be under way on return."""
    moved = arena.to(device, non_blocking=True, copy=True)
    typed = {dtype: moved.view(dtype) for dtype in {tensor.dtype for tensor in _tensors(filter(None, deltas))}}
    return [
        None
        if delta is None
        else _with_tensors(
            delta, (typed[t.dtype].as_strided(t.shape, t.stride(), t.storage_offset()) for t in _tensors([delta]))
        )
        for delta in deltas
    ]


def _tensors(deltas: Iterable[LinearDelta]) -> Iterator[Tensor]:
    for delta in deltas:
        yield from (t for t in (delta.a, delta.b, delta.gain, delta.shift) if t is not None)


def _with_tensors(delta: LinearDelta, tensors: Iterator[Tensor]) -> LinearDelta:
    """`delta` with other tensors in the places of its own, in the order of `_tensors`."""
    a, b, gain, shift = (None if t is None else next(tensors) for t in (delta.a, delta.b, delta.gain, delta.shift))
    return LinearDelta(a, b, delta.scale, gain, shift)


def _view(arena: Tensor, like: Tensor, offset: int) -> Tensor:
    return arena[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
