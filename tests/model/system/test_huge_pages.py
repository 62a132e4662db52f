"""Tensors cut from one piece of memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from lora_serve.model.native.operators import HugePages


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_tensors_are_apart_and_of_the_asked_shape() -> None:
    pages = HugePages()
    tensors = [pages.empty((3, size), torch.int32) for size in (0, 1, 5, 700_000, 700_000, 5_000_000, 7)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.shape for tensor in tensors] == [(3, n) for n in (0, 1, 5, 700_000, 700_000, 5_000_000, 7)]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_small_tensors_lie_side_by_side() -> None:
    pages = HugePages()
    tensors = [pages.empty((2**20,), torch.int32) for _ in range(16)]  # 4 MiB each, in a piece of 64
    steps = [b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(tensors[:16])]
    assert steps == [2**22] * 15


def test_memory_is_freed_with_the_last_tensor_or_view() -> None:
    pages = HugePages()
    first, second = (pages.empty((1000, 1000), torch.int32) for _ in range(2))
    view, place = first[10:], first.data_ptr()
    del first, second
    assert is_mapped(place)
    view.fill_(1)
    del view
    assert not is_mapped(place)
    assert bool((pages.empty((10,), torch.int32).fill_(3) == 3).all())
