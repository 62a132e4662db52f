"""A plain LoRA as one flat file, so that loading it again is one read, one hash and views, with little Python and GIL.

    magic [8] | SHA-256 of all that follows [32] | length of the header, u64 little-endian [8] | header | arena

The header is JSON: {"digest", "base", "rank", "modules": [[path, dtype, rank, scale, offset of A, offset of B], ...]},
offsets in bytes from the file's start; everything in the arena is aligned. The file is a cache: whatever is wrong with
it only means that the adapter's own files are read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_serve.adapters.regular_file import filled, open_regular, size_of
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.model_spec import LinearShape, ModelSpec
from lora_serve.model.lora.host_adapter import (
    ALIGNMENT,
    HostAdapter,
    LinearDelta,
    SlotColumns,
    aligned,
    bytes_of,
    laid_out,
)
from lora_serve.model.system.process import advise_huge_pages

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
    return HostAdapter(adapter.digest, adapter.name, header["rank"], deltas, columns=columns, is_plain=True, arena=file)


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
