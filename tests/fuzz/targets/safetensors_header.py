"""The header of an adapter's weights. What is taken is what safetensors itself reads, from memory and from a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import safetensors.numpy

from lora_serve.adapters.checkpoint.safetensors_header import HeaderBounds, parse_header, read_header
from lora_serve.core.errors import InvalidAdapterError
from tests.fuzz.files import file_of
from tests.fuzz.mutating import within
from tests.hostile.adapter_files import WEIGHT_FILES, built

ERRORS = (InvalidAdapterError,)
BOUNDS = HeaderBounds(64, 2**14)
HEADER = {
    "__metadata__": {"format": "pt"},
    "base_model.model.layers.0.q_proj.lora_A.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "base_model.model.layers.0.q_proj.lora_B.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [32, 64]},
}


def fuzz(data: bytes) -> None:
    with contextlib.suppress(InvalidAdapterError), file_of(data) as path:
        read_header(path, BOUNDS)
    table, end = parse_header(memoryview(data), "weights")
    with file_of(data) as path:
        assert read_header(path) == table
    judged = dict(safetensors.deserialize(data))
    assert judged.keys() == table.keys()
    for name, tensor in table.items():
        assert (judged[name]["dtype"], tuple(judged[name]["shape"])) == (tensor.dtype, tensor.shape)
        assert bytes(judged[name]["data"]) == data[end + tensor.begin : end + tensor.end]


def seeds() -> Iterator[bytes]:
    sound = built(HEADER, bytes(64))
    yield sound
    yield built({"a": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [0, 0]}}, b"")
    yield built({"a": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]}}, b"ab")
    yield built(json.dumps(HEADER).encode() + b" " * 70, bytes(64))
    yield from (seed for change in WEIGHT_FILES.values() if len(seed := change(sound)) < 4096)


def _load(data: bytes) -> Any:
    size = int.from_bytes(data[:8], "little")
    return [json.loads(data[8 : 8 + size]), len(data) - 8 - size]


def _dump(tree: Any) -> bytes:
    """With as many bytes behind the header as it was, or as its offsets ask for."""
    header, size = tree
    ends = [one["data_offsets"][1] for one in header.values() if "data_offsets" in one] if size % 3 else []
    return built(header, bytes(min(max([*ends, 0]) if ends else size, 4096)))


mutate = within(_load, _dump, (*HEADER, "dtype", "shape", "data_offsets", "F32", "F16", "BF16", "F64"))
