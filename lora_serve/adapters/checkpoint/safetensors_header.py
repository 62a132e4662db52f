"""Strict reader of a safetensors header; reads the header only, trusts nothing.

Format: https://huggingface.co/docs/safetensors: u64 little-endian header length, a JSON object of
name -> {dtype, shape, data_offsets} that begins with "{" and may be padded with spaces, then the tensors' bytes without
gap or overlap.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_serve.adapters.regular_file import open_regular, size_of
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.strict_json import parse_object

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
MAX_HEADER_BYTES = 16 * 2**20
MAX_PADDING = 4096  # spaces: the format's own writer aligns to 8 bytes, some others to a page
MAX_DIMENSIONS = 8
_PIECE = 2**20
MAX_DIMENSION = 2**31
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x1f\x8b")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor in the file; `begin` and `end` count from the end of the header."""

    name: str
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class HeaderBounds:
    """The most that a header of an adapter of the base model may hold."""

    num_tensors: int
    num_bytes: int


def read_header(path: Path, bounds: HeaderBounds | None = None) -> Mapping[str, TensorInfo]:
    """The table of tensors, checked against the file's size. What is beyond `bounds` is not looked at any further.

    Raises InvalidAdapterError, OSError.
    """
    with open_regular(path) as file:
        size = size_of(file)
        length = _header_length(file.read(64), size, path.name)
        if bounds is not None:
            _require(length <= bounds.num_bytes, f"has a header of {length} bytes ({bounds.num_bytes} at most)", path)
        file.seek(8, os.SEEK_SET)
        header = _parse(file.read(length), path.name)
    if bounds is not None:
        _require(len(header) <= bounds.num_tensors, f"has {len(header)} tensors ({bounds.num_tensors} at most)", path)
    return _check(header, size - 8 - length, path.name)


def is_zero(path: Path, tensors: Iterable[TensorInfo]) -> bool:
    """True if the file has no bit that is set in these tensors. Raises OSError."""
    with open_regular(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for tensor in tensors:
            file.seek(start + tensor.begin)
            if any(any(file.read(min(left, _PIECE))) for left in range(tensor.end - tensor.begin, 0, -_PIECE)):
                return False
    return True


def _require(is_possible: bool, what: str, path: Path) -> None:
    if not is_possible:
        raise InvalidAdapterError([f"{path.name}: no adapter of the base model {what}"])


def parse_header(content: memoryview, name: str) -> tuple[Mapping[str, TensorInfo], int]:
    """The same of a file in memory, and where the header ends. Raises InvalidAdapterError."""
    end = 8 + _header_length(bytes(content[:64]), len(content), name)
    return _check(_parse(bytes(content[8:end]), name), len(content) - end, name), end


def _header_length(start: bytes, size: int, name: str) -> int:
    _refuse_other_formats(start, name)
    if size < 8:
        raise InvalidAdapterError([f"{name} is truncated: {size} bytes"])
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise InvalidAdapterError(
            [f"{name} is truncated or not a safetensors file: its header claims {length} bytes of {size}"]
        )
    return length


def _refuse_other_formats(start: bytes, name: str) -> None:
    if start.startswith(_LFS_POINTER):
        raise InvalidAdapterError([f"{name} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`"])
    if start.startswith(_PICKLES) and start[8:9] != b"{":  # a header of 640 bytes begins like a pickle
        raise InvalidAdapterError([f"{name} is a pickle or archive under another name; only safetensors are accepted"])


def _parse(text: bytes, name: str) -> dict[str, Any]:
    what, content = f"the safetensors header of {name}", text.rstrip(b" ")
    if text[:1].isspace():
        raise InvalidAdapterError([f"{what} does not begin with {{"])
    if len(text) - len(content) > MAX_PADDING or content[-1:].isspace():
        raise InvalidAdapterError([f"{what} is padded with more than {MAX_PADDING} spaces, or with something else"])
    header = parse_object(content, what)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidAdapterError([f"{name}: __metadata__ must map strings to strings"])
    return header


def _check(header: dict[str, Any], num_bytes: int, name: str) -> Mapping[str, TensorInfo]:
    reasons: list[str] = []
    tensors = []
    for tensor_name, entry in header.items():
        problem = _entry_problem(entry)
        if problem is not None:
            reasons.append(f"{name}: tensor {tensor_name[:200]!r}: {problem}")
        else:
            tensors.append(TensorInfo(tensor_name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]))
    if not header:
        reasons.append(f"{name} holds no tensors")
    if not reasons:
        reasons = _layout_problems(tensors, num_bytes, name)
    if reasons:
        raise InvalidAdapterError(reasons)
    return {tensor.name: tensor for tensor in tensors}


def _entry_problem(entry: Any) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "its entry must hold dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        return f"dtype {str(dtype)[:40]!r} is not one of {', '.join(DTYPE_BYTES)}"
    if not _are_counts(shape, MAX_DIMENSIONS) or any(dimension > MAX_DIMENSION for dimension in shape):
        return "its shape is not a short list of sizes"
    if not _are_counts(offsets, 2) or len(offsets) != 2:
        return "data_offsets must be two numbers"
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        return f"shape {shape} of {dtype} needs {expected} bytes, data_offsets give {offsets[1] - offsets[0]}"
    return None


def _are_counts(value: Any, max_length: int) -> bool:
    return isinstance(value, list) and len(value) <= max_length and all(type(n) is int and n >= 0 for n in value)


def _layout_problems(tensors: list[TensorInfo], num_bytes: int, name: str) -> list[str]:
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end:
            what = "overlaps another tensor" if tensor.begin < end else f"leaves a hole of {tensor.begin - end} bytes"
            return [f"{name}: tensor {tensor.name[:200]!r} {what}"]
        end = tensor.end
    if end > num_bytes:
        return [f"{name} is truncated: its tensors need {end} bytes and {num_bytes} are there"]
    if end < num_bytes:
        return [f"{name} holds {num_bytes - end} bytes after its last tensor"]
    return []
