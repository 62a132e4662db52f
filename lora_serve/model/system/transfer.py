"""Between host and device without making the host wait more often than it must.

A copy from pageable memory makes the calling thread wait for all that the device was given before; one from pinned
memory only joins its queue. On the CPU these are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers, or a host tensor, on `device`; the copy may be under way on return."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    # torch's allocator of pinned memory keeps the piece until the copy is done
    return host.pin_memory().to(device, non_blocking=True)


def columns_to_device(columns: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each column [n] int64 on `device`, all in one copy."""
    flat = to_device([value for column in columns for value in column], torch.int64, device)
    return list(torch.split(flat, [len(column) for column in columns]))


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors' values in host memory, after one wait for all of them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return list(tensors)
    found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    done.synchronize()
    return found
