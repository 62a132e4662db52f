"""The pool of the KV cache: bytes by block index. `engine/blocks.py` decides who owns which block."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_serve.core.batch import BlockMoves
from lora_serve.model.kv_format import PLAIN, KVFormat
from lora_serve.model.system.device_memory import to_device
from lora_serve.model.system.process import advise_huge_pages


class KVHeads(NamedTuple):
    """The shape of a layer's K, and of its V, for one token."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of what one token leaves in the cache, learned from the model itself."""

    layers: tuple[KVHeads, ...]
    dtype: torch.dtype  # the model's
    kinds: tuple[int, ...] = ()  # by layer, its kind: see `ModelSpec.windows`; (): there is one
    form: KVFormat = PLAIN

    @staticmethod
    def alike(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVShape:
        """That of layers with one shape."""
        return KVShape((KVHeads(num_kv_heads, head_dim),) * num_layers, dtype)

    @property
    def num_kinds(self) -> int:
        return max(self.kinds, default=0) + 1

    def kind_of(self, layer: int) -> int:
        return self.kinds[layer] if self.kinds else 0

    def block_bytes(self, block_size: int, kind: int | None = None) -> int:
        """Bytes of one block of `block_size` tokens over all layers, or those of a kind, K and V."""
        layers = (heads for layer, heads in enumerate(self.layers) if kind in (None, self.kind_of(layer)))
        numbers = sum(heads.num_heads * self.form.width(heads.head_dim) for heads in layers)
        return 2 * block_size * numbers * self.form.row_type(self.dtype).itemsize


class KVCache:
    """K and V of every layer in blocks of `block_size` tokens (PagedAttention, Kwon et al., SOSP 2023).

    Block 0 is never allocated and stays zero: block tables are padded with it. Layers of one kind and shape lie in one
    pool.
    """

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device, num_spare: int = 0
    ) -> None:
        """`num_blocks` of each kind with block 0; the `num_spare` blocks after those are the runner's own."""
        self.shape = shape
        self._num_spare = num_spare
        self.block_size = block_size
        self.device = device
        self._places: list[tuple[int, int]] = []  # by layer: the number of its pool, and its place there
        self._layers_of: dict[tuple[int, KVHeads], int] = {}  # by kind and shape, how many layers have it
        for layer, heads in enumerate(shape.layers):
            key = shape.kind_of(layer), heads
            place = self._layers_of.setdefault(key, 0)
            self._layers_of[key] += 1
            self._places.append((list(self._layers_of).index(key), place))
        self._pools: list[Tensor] = []  # each [2, layers, blocks, block_size, num_kv_heads, width of a row]
        self._layers: list[tuple[Tensor, Tensor]] = []  # K and V of each
        self.num_resizes = 0  # tells users of the pool's address that it is another pool
        self.resize(num_blocks)

    def resize(self, num_blocks: int, num_host_blocks: int = 0, windowed: tuple[int, int] | None = None) -> None:
        """Makes a pool of another number of empty blocks, and blocks in host memory, which a GPU reads by itself.
        `windowed`: both numbers for the second kind of layers; None: the same.
        """
        size, form, dtype = self.block_size, self.shape.form, self.shape.form.row_type(self.shape.dtype)
        rows = {heads: (heads.num_heads, form.width(heads.head_dim)) for heads in self.shape.layers}
        self.num_resizes += 1
        self.num_blocks = num_blocks
        on_device, on_host = zip((num_blocks, num_host_blocks), windowed or (num_blocks, num_host_blocks), strict=True)
        self._counts = on_device
        self._pools, self._layers = [], []  # what was there is freed first
        for (kind, heads), count in self._layers_of.items():
            num_in_all = on_device[kind] + self._num_spare
            self._pools.append(_zeros((2, count, num_in_all, size, *rows[heads]), dtype, self.device))
            advise_huge_pages(self._pools[-1])
        self._layers = [(self._pools[pool][0, place], self._pools[pool][1, place]) for pool, place in self._places]
        is_pinned = self.device.type == "cuda" and num_host_blocks > 0
        self._host = [
            torch.zeros((on_host[kind], 2, count, size, *rows[heads]), dtype=dtype, pin_memory=is_pinned)
            for (kind, heads), count in self._layers_of.items()
        ]

    def store_as(self, form: KVFormat) -> None:
        """Makes an empty pool of another form, which has no blocks yet but its spare ones."""
        self.shape = replace(self.shape, form=form)
        self.resize(1)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as they are stored, each [num_blocks, block_size, num_kv_heads, width of a row]."""
        return self._layers[index]

    def addresses(self, index: int) -> tuple[int, int]:
        """The addresses at which K and V of one layer begin."""
        keys, values = self._layers[index]
        return keys.data_ptr(), values.data_ptr()

    def write(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Stores key and value [num_tokens, num_kv_heads, head_dim], rounded to the cache's form, at flat positions."""
        for pool, numbers in zip(self._layers[layer], (key, value), strict=True):
            pool.flatten(0, 1).index_copy_(0, positions, self.shape.form.encode(numbers, self.shape.dtype))

    def gather(self, layer: int, indices: Tensor, *, by_block: bool = True) -> list[Tensor]:
        """K and V of whole blocks, or of flat positions: each a copy [num_tokens, num_kv_heads, head_dim] of the
        model's type.
        """
        form, head_dim, dtype = self.shape.form, self.shape.layers[layer].head_dim, self.shape.dtype
        pools = self._layers[layer]
        found = (
            pool.index_select(0, indices).flatten(0, 1) if by_block else pool.flatten(0, 1).index_select(0, indices)
            for pool in pools
        )
        return [form.decode(rows, head_dim, dtype) for rows in found]

    def read(self, positions: Tensor, windowed: Tensor | None = None) -> Tensor:
        """K and V of all layers at flat positions: a copy [num_layers, 2, num_tokens, numbers of the widest layer].
        `windowed`: those in the second kind of layers; None: the same.
        """
        by_kind = positions, positions if windowed is None else windowed
        widest = max(heads.num_heads * heads.head_dim for heads in self.shape.layers)
        layers = range(len(self._layers))
        places = [by_kind[self.shape.kind_of(layer)] for layer in layers]
        found = [[one.flatten(1) for one in self.gather(layer, places[layer], by_block=False)] for layer in layers]
        return torch.stack([F.pad(torch.stack(each), (0, widest - each[0].shape[1])) for each in found])

    def spare_blocks(self, num_rows: int, num_tokens: int, kind: int = 0) -> list[tuple[int, ...]]:
        """Block tables of `num_tokens` tokens each out of the spare blocks of a kind."""
        width = -(-num_tokens // self.block_size)
        assert num_rows * width <= self._num_spare, "there are not that many spare blocks"
        first = self._counts[kind]
        return [tuple(range(first + i * width, first + (i + 1) * width)) for i in range(num_rows)]

    def zero(self, blocks: Sequence[int], windowed: Sequence[int] | None = None) -> None:
        """Clears blocks before their new owner uses them: no residue, not even a NaN behind a mask. `windowed`: those
        of the second kind; None: the same.
        """
        for kind, own in enumerate((blocks, blocks if windowed is None else windowed)[: self.shape.num_kinds]):
            if own:
                indices = to_device(own, torch.int64, self.device)
                for (of, _), pool in zip(self._layers_of, self._pools, strict=True):
                    if of == kind:
                        pool.index_fill_(2, indices, 0)

    def move(self, moves: BlockMoves) -> None:
        """Copies whole blocks to host memory, then others back; done when it returns."""
        for (kind, _), pool, host in zip(self._layers_of, self._pools, self._host, strict=True):
            for copy in (copy for copy in moves.out if copy.kind == kind):
                host[copy.host_block].copy_(pool[:, :, copy.block])
            for copy in (copy for copy in moves.back if copy.kind == kind):
                pool[:, :, copy.block].copy_(host[copy.host_block])
        if moves and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU its pages take no memory until they are used, where `torch.zeros` writes them all."""
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
