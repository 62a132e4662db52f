"""The tensors of a safetensors file, as views of its bytes, and copies of these in host memory.

Format: https://huggingface.co/docs/safetensors. That library's own reader is not used here: `safe_open` (0.8) keeps
some 60 bytes of every tensor that was read for as long as the process lives, and a server reads adapters without end
(https://github.com/vllm-project/vllm-omni/issues/7143 measures the same).
"""

from __future__ import annotations

import math
import mmap
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.digest import WEIGHTS_NAME
from lora_serve.adapters.checkpoint.safetensors_header import parse_header
from lora_serve.adapters.regular_file import open_regular, size_of

# float16's range is too small to mix with bfloat16 and float32 activations, and CPUs compute it slowly.
HOST_DTYPES: Mapping[torch.dtype, torch.dtype] = types.MappingProxyType(
    {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
)
INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightsFile:
    """A safetensors file in memory. `tensors`: the checked table of its tensors."""

    def __init__(self, content: memoryview, check: Callable[[], None] = lambda: None) -> None:
        """The whole file, writable, as torch asks for. `check`: called at every tensor. Raises InvalidAdapterError."""
        self._check = check
        self.tensors, self._start = parse_header(content, WEIGHTS_NAME)
        self._content = content

    def get_tensor(self, name: str) -> Tensor:
        """A view, in the file's dtype; a copy where the file does not align it."""
        self._check()
        info = self.tensors[name]
        dtype, begin = _DTYPES[info.dtype], self._start + info.begin
        if info.begin == info.end:
            return torch.empty(info.shape, dtype=dtype)
        if begin % dtype.itemsize:  # the format asks for no alignment
            piece = bytearray(self._content[begin : self._start + info.end])
            return torch.frombuffer(piece, dtype=dtype).reshape(info.shape)
        count = math.prod(info.shape)
        return torch.frombuffer(self._content, dtype=dtype, count=count, offset=begin).reshape(info.shape)


def open_weights(folder: Path, check: Callable[[], None] = lambda: None) -> WeightsFile:
    """The weights of a folder that nobody else writes: they are read from the disk as they are looked at.

    What is written to a tensor stays in memory. Raises InvalidAdapterError, OSError.
    """
    with open_regular(folder / WEIGHTS_NAME) as file:
        size = size_of(file)
        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        return WeightsFile(memoryview(content), check)


def copy_of(view: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor that owns its memory: `view` lies in the file's mapping.

    By numpy, on this thread alone: torch's own copy would start a second team of OpenMP threads beside the engine's
    (measured on 2 busy cores: 2.7 s against 0.1 s for 84 MB).
    """
    if view.dtype == torch.float16 and dtype == torch.float32:
        return torch.from_numpy(view.numpy().astype("float32", order="C"))
    copy = torch.from_numpy(bits_of(view).copy(order="C")).view(view.dtype)
    return copy if copy.dtype == dtype else copy.to(dtype)


def bits_of(tensor: Tensor) -> Any:
    """The tensor's memory as a numpy array of signed integers of the same width; numpy knows no bfloat16."""
    return tensor.view(INTEGERS[tensor.itemsize]).numpy()
