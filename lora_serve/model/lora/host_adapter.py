"""An adapter in host memory, ready for a device slot: its effect on each module, with the base's part worked in.

The low-rank tensors may lie in one piece of memory, an arena, so that a copy, a read or a hash is one call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lora_serve.adapters.regular_file import filled, open_regular, size_of
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.model_spec import LinearShape, ModelSpec
from lora_serve.model.lora.changes import Change, TensorFields
from lora_serve.model.system.process import advise_huge_pages

_TABLE_TYPES = (*[torch.int64] * 4, torch.int32, torch.float32, torch.int32)  # of SlotTables
_NOTHING = (0, 0, 0, 0, 0, 0.0, 0)
ALIGNMENT = 64  # bytes: a cache line
WEIGHT_TYPES = (torch.bfloat16, torch.float32)  # of A and B


@dataclass(frozen=True, slots=True)
class LinearDelta(TensorFields):
    """y [n, out] = gain * y + shift + scale * (x [n, in] A^T) B of one linear layer; None stands for one, or zero.

    gain is DoRA's magnitude over norm, shift the sum of trained biases. Of a stack of experts' weights a and b have the
    experts as their first dimension, and there is no gain or shift.
    """

    a: Tensor | None  # [rank, in_features], contiguous
    b: Tensor | None  # [rank, out_features], contiguous, of a's dtype
    scale: float  # not folded into a or b: folding would round twice in bfloat16
    gain: Tensor | None = None  # [out_features] float32
    shift: Tensor | None = None  # [out_features] float32

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[-2]


class SlotTables(NamedTuple):
    """The addresses of adapters' weights, for kernels that follow them; every table is [num_modules, num_slots] or, of
    one adapter, [num_modules].
    """

    a: Tensor  # int64 addresses of A [rank, in]; 0: nothing of low rank
    b: Tensor  # int64 addresses of B [rank, out]
    gain: Tensor  # int64 addresses of gain [out], 0: one
    shift: Tensor  # int64 addresses of shift [out], 0: zero
    rank: Tensor  # int32
    scale: Tensor  # float32
    is_bfloat16: Tensor  # int32, of A and B

    @staticmethod
    def empty(num_modules: int, num_slots: int) -> SlotTables:
        return SlotTables(*(torch.zeros(num_modules, num_slots, dtype=dtype) for dtype in _TABLE_TYPES))

    @property
    def num_slots(self) -> int:
        return self.a.shape[1]

    def widened(self, num_slots: int) -> SlotTables:
        wide = SlotTables.empty(len(self.a), num_slots)
        for new, old in zip(wide, self, strict=True):
            new[:, : self.num_slots] = old
        return wide

    def set(self, slot: int, columns: SlotTables) -> None:
        for table, column in zip(self, columns, strict=True):
            table[:, slot] = column

    def moved(self, distance: int) -> SlotTables:
        """The same with every address so many bytes further on."""
        a, b, gain, shift = (torch.where(table == 0, 0, table + distance) for table in self[:4])
        return self._replace(a=a, b=b, gain=gain, shift=shift)

    def clear(self, slot: int) -> None:
        for addresses in (self.a, self.b, self.gain, self.shift):
            addresses[:, slot] = 0

    def addresses(self, module: int) -> list[int]:
        """Those of the module's row of every table, as kernels in C take them."""
        return [table[module].data_ptr() for table in self]


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """An adapter in the slot tables' form, made on a loader's thread: loading a slot is a copy of seven columns."""

    deltas: tuple[LinearDelta | None, ...]  # whose memory the addresses are
    tables: SlotTables
    touched: Mapping[torch.dtype, int]  # see `LoraSlots.touched`

    @staticmethod
    def of(deltas: Sequence[LinearDelta | None]) -> SlotColumns:
        """`deltas`: one per linear layer, in the order of `ModelSpec.linears`; None: the layer is not adapted."""
        columns = zip(*(_NOTHING if delta is None else _row(delta) for delta in deltas), strict=True)
        tables = (torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, _TABLE_TYPES, strict=True))
        touched = dict.fromkeys(WEIGHT_TYPES, 0)
        for module, delta in enumerate(deltas):
            if delta is not None:
                touched[torch.bfloat16 if delta.a is None else delta.a.dtype] |= 1 << module
        return SlotColumns(tuple(deltas), SlotTables(*tables), touched)


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One adapter version in host memory, by module path as in ModelSpec."""

    digest: str
    rank: int  # the largest of any module
    deltas: Mapping[str, LinearDelta]
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)  # in the order they apply
    vocab_size: int = 0  # of its own embedding and output head; 0: the base's
    columns: SlotColumns | None = None  # of `deltas`; None: a slot that is loaded makes them itself
    is_plain: bool = False  # A and B of linear layers, as they were saved: nothing of the base's weights is in it
    arena: Tensor | None = None  # uint8: the one piece of memory in which all tensors of `deltas` lie

    @property
    def num_bytes(self) -> int:
        changes = sum(change.num_bytes for table in self.changes.values() for change in table)
        return changes + sum(delta.num_bytes for delta in self.deltas.values())

    @property
    def extra_bytes(self) -> int:
        """Bytes of host memory that it takes beyond its tensors', where they are pinned."""
        if self.arena is None or not self.arena.is_pinned():
            return 0
        return pinned_bytes(self.arena.nbytes) - sum(delta.num_bytes for delta in self.deltas.values())


def pinned_bytes(num_bytes: int) -> int:
    """The bytes that torch's allocator takes for a pinned piece: the next power of two, 128 MiB for 84 MB."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _row(delta: LinearDelta) -> tuple[int, int, int, int, int, float, int]:
    a, b, gain, shift = delta.a, delta.b, delta.gain, delta.shift
    return (
        0 if a is None else a.data_ptr(),
        0 if b is None else b.data_ptr(),
        0 if gain is None else gain.data_ptr(),
        0 if shift is None else shift.data_ptr(),
        delta.rank,
        delta.scale,
        0 if a is None else int(a.dtype is torch.bfloat16),
    )


@torch.inference_mode(False)  # its tensors are as those that were read: they may be written to
def in_arena(adapter: HostAdapter, linears: Iterable[str], *, pin: bool) -> HostAdapter:
    """The adapter with its linear layers' tensors in one arena. `pin`: in memory that a GPU reads by itself.

    `linears`: every linear layer of the base, as in ModelSpec. One piece fills huge pages.
    """
    places = list(_tensors(adapter.deltas.values()))
    offsets, num_bytes = laid_out(places)
    arena = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
    advise_huge_pages(arena)
    for tensor, offset in zip(places, offsets, strict=True):
        arena.numpy()[offset : offset + tensor.nbytes] = bytes_of(tensor)
    views = iter([_view(arena, tensor, offset) for tensor, offset in zip(places, offsets, strict=True)])
    deltas = {path: _with_tensors(delta, views) for path, delta in adapter.deltas.items()}
    columns = SlotColumns.of([deltas.get(path) for path in linears])
    return dataclasses.replace(adapter, deltas=deltas, columns=columns, arena=arena)


def laid_out(tensors: Iterable[Tensor], start: int = 0) -> tuple[list[int], int]:
    """The aligned offset of each tensor, one after another from `start` on; and the aligned end of the last."""
    offsets, position = [], aligned(start)
    for tensor in tensors:
        offsets.append(position)
        position = aligned(position + tensor.nbytes)
    return offsets, position


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a flat numpy array of bytes; nothing is copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _tensors(deltas: Iterable[LinearDelta]) -> Iterator[Tensor]:
    for delta in deltas:
        yield from (t for t in (delta.a, delta.b, delta.gain, delta.shift) if t is not None)


def _with_tensors(delta: LinearDelta, tensors: Iterator[Tensor]) -> LinearDelta:
    """The delta with other tensors in the places of its own, in the order of `_tensors`."""
    a, b, gain, shift = (None if t is None else next(tensors) for t in (delta.a, delta.b, delta.gain, delta.shift))
    return LinearDelta(a, b, delta.scale, gain, shift)


def _view(arena: Tensor, like: Tensor, offset: int) -> Tensor:
    return arena[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


_MAGIC = b"LSPREP1\n"
_START = 48  # of the header
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class NotPreparedError(Exception):
    """The file is torn, of another format or of another adapter."""


@dataclass(frozen=True, slots=True)
class PreparedBase:
    """The facts of the base model that a prepared file depends on."""

    fingerprint: str
    linears: Mapping[str, LinearShape]

    @staticmethod
    def of(spec: ModelSpec) -> PreparedBase:
        """The facts of a model."""
        return PreparedBase(spec.fingerprint, spec.linears)


def file_name(adapter: AdapterRef, base: PreparedBase) -> str:
    """The name of the file for one base and one rank (to which other kinds are converted) beside the adapter's own
    files.
    """
    facts = repr((base.fingerprint, adapter.rank)).encode()
    return f"prepared-{hashlib.sha256(facts).hexdigest()[:16]}"


def pack(adapter: HostAdapter, base: PreparedBase) -> memoryview:
    """The file of an adapter that `is_plain`."""
    assert adapter.is_plain, "what is in it of the base's weights would outlive them"
    tensors = [tensor for delta in adapter.deltas.values() for tensor in (delta.a, delta.b) if tensor is not None]
    offsets, _ = laid_out(tensors)
    header = _header(adapter, base, offsets)
    start = aligned(_START + len(header) + 20 * len(tensors))  # offsets grow by a few digits when they are moved
    offsets, size = laid_out(tensors, start)
    header = _header(adapter, base, offsets)
    content = bytes_of(torch.zeros(size, dtype=torch.uint8))  # numpy copies into it without holding the GIL
    file = memoryview(content)
    file[:8] = _MAGIC
    file[40:_START] = len(header).to_bytes(8, "little")
    file[_START : _START + len(header)] = header
    for tensor, offset in zip(tensors, offsets, strict=True):
        content[offset : offset + tensor.nbytes] = bytes_of(tensor)
    file[8:40] = hashlib.sha256(file[40:]).digest()
    return file


def read(path: Path, *, pin: bool) -> Tensor:
    """The file's bytes, uint8, in memory of its own; `pin`: that a GPU reads by itself. Raises OSError."""
    with open_regular(path) as file:
        arena = torch.empty(size_of(file), dtype=torch.uint8, pin_memory=pin)
        advise_huge_pages(arena)
        for _ in filled(file, memoryview(bytes_of(arena))):
            pass
        return arena


def verify(file: Tensor) -> None:
    """Raises NotPreparedError unless the file is whole."""
    content = memoryview(bytes_of(file))
    if len(content) < _START or len(content) % ALIGNMENT or content[:8] != _MAGIC:
        raise NotPreparedError("it is no such file")
    if hashlib.sha256(content[40:]).digest() != content[8:40]:
        raise NotPreparedError("its content is not what was written")


def unpack(file: Tensor, adapter: AdapterRef, base: PreparedBase) -> HostAdapter:
    """The adapter of a verified file; its tensors are views. Raises NotPreparedError."""
    try:
        return _unpack(file, adapter, base)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise NotPreparedError(f"its header is wrong: {error}") from None


def _unpack(file: Tensor, adapter: AdapterRef, base: PreparedBase) -> HostAdapter:
    length = int.from_bytes(bytes(file[40:_START].numpy()), "little")
    header: dict[str, Any] = json.loads(bytes(file[_START : _START + length].numpy()))
    if (header["digest"], header["base"]) != (adapter.digest, base.fingerprint):
        raise NotPreparedError("it is of another adapter or base")
    typed = {name: file.view(dtype) for name, dtype in _DTYPES.items()}
    deltas = {row[0]: _delta(typed, base.linears, *row) for row in header["modules"]}
    columns = SlotColumns.of([deltas.get(path) for path in base.linears])
    return HostAdapter(adapter.digest, header["rank"], deltas, columns=columns, is_plain=True, arena=file)


def _delta(
    typed: Mapping[str, Tensor],
    linears: Mapping[str, LinearShape],
    path: str,
    dtype: str,
    rank: int,
    scale: float,
    a_offset: int,
    b_offset: int,
) -> LinearDelta:
    memory, shape = typed[dtype], linears[path]
    size = memory.itemsize
    a = memory.as_strided((rank, shape.in_features), (shape.in_features, 1), a_offset // size)
    b = memory.as_strided((rank, shape.out_features), (shape.out_features, 1), b_offset // size)
    return LinearDelta(a, b, scale)


def _header(adapter: HostAdapter, base: PreparedBase, offsets: list[int]) -> bytes:
    places = iter(offsets)
    modules = [
        [path, str(delta.a.dtype).removeprefix("torch."), delta.rank, delta.scale, next(places), next(places)]
        for path, delta in adapter.deltas.items()
        if delta.a is not None
    ]
    table = {"digest": adapter.digest, "base": base.fingerprint, "rank": adapter.rank, "modules": modules}
    return json.dumps(table).encode()
