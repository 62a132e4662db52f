"""An adapter's tensors, as the trainer saved them, in host memory. With `values.py` all that knows torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lora_serve.adapters.checkpoint.artifact import Artifact, parse_artifact
from lora_serve.adapters.checkpoint.binding import (
    BoundAdapter,
    BoundDelta,
    BoundEmbedding,
    BoundExperts,
    BoundLinear,
    BoundTokens,
)
from lora_serve.adapters.checkpoint.content import AdapterContent
from lora_serve.adapters.checkpoint.conversion import convert
from lora_serve.adapters.checkpoint.digest import WEIGHTS_NAME
from lora_serve.adapters.checkpoint.expert_weights import stack_experts
from lora_serve.adapters.checkpoint.host_tensors import HOST_DTYPES, copy_of
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo, parse_header
from lora_serve.adapters.checkpoint.saved import SavedAdapter, SavedDelta, SavedEmbedding, SavedLinear, SavedTokens
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def parse_checked(content: AdapterContent, adapter: AdapterRef, spec: ModelSpec) -> SavedAdapter:
    """The tensors of a registered adapter. Raises InvalidAdapterError."""
    if adapter.traits.base not in ("", spec.fingerprint):
        raise InvalidAdapterError([f"it was registered for another base model than {spec.name}: register it again"])
    artifact = parse_artifact(content, spec)
    if artifact.config.init:  # a registration stores it as plain LoRA
        raise InvalidAdapterError([f"its {artifact.config.init} initialisation was not undone: register it again"])
    file = _WeightsInMemory(content.weights, artifact.tensors)
    return _saved(file, artifact, adapter.name, adapter.rank or None)


def read_weights(folder: Path, artifact: Artifact, name: str = "", max_rank: int | None = None) -> SavedAdapter:
    """The tensors of a folder that was checked. `max_rank`: for what is converted to LoRA (None: whatever is exact).

    Raises InvalidAdapterError, OSError.
    """
    with open_weights(folder) as file:
        return _saved(file, artifact, name, max_rank)


def open_weights(folder: Path) -> Any:
    """The safetensors file of a folder, as a context manager. Raises InvalidAdapterError, OSError."""
    try:
        return safe_open(folder / WEIGHTS_NAME, framework="pt", device="cpu")
    except SafetensorError as error:
        raise InvalidAdapterError([f"{WEIGHTS_NAME} is not a safetensors file: {error}"]) from None


def _saved(file: Any, artifact: Artifact, name: str, max_rank: int | None) -> SavedAdapter:
    bound, reader = artifact.bound, _Reader(file)
    linears = {path: reader.linear(linear) for path, linear in bound.linears.items()}
    if bound.conversions is not None:
        linears |= convert(bound.conversions, file.get_tensor, max_rank)
    return SavedAdapter(
        artifact.digest,
        name,
        linears,
        {path: reader.embedding(embedding) for path, embedding in bound.embeddings.items()},
        {path: {key: reader.delta(delta) for key, delta in table.items()} for path, table in bound.deltas.items()},
        {path: reader.tokens(tokens) for path, tokens in bound.tokens.items()},
        _own(bound, reader),
        bound.vocab_size,
    )


def _own(bound: BoundAdapter, reader: _Reader) -> dict[str, dict[str, Tensor]]:
    return {path: {key: reader.tensor(name) for key, name in table.items()} for path, table in bound.parameters.items()}


class _WeightsInMemory:
    """What safetensors gives for a file, of one that was read: tensors are views."""

    def __init__(self, content: memoryview, tensors: Mapping[str, TensorInfo]) -> None:
        self._content = content
        self._tensors = tensors
        self._start = parse_header(content, WEIGHTS_NAME)[1]

    def get_tensor(self, name: str) -> Tensor:
        info = self._tensors[name]
        dtype, begin = _DTYPES[info.dtype], self._start + info.begin
        if info.begin == info.end:
            return torch.empty(info.shape, dtype=dtype)
        if begin % dtype.itemsize:  # the format asks for no alignment
            piece = bytearray(self._content[begin : self._start + info.end])
            return torch.frombuffer(piece, dtype=dtype).reshape(info.shape)
        count = math.prod(info.shape)
        return torch.frombuffer(self._content, dtype=dtype, count=count, offset=begin).reshape(info.shape)


class _Reader:
    """Copies tensors out of an open file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def linear(self, bound: BoundLinear) -> SavedLinear:
        a, b = (None, None) if bound.a_name is None else self._pair(bound.a_name, bound.b_name or "")
        vectors = (self._vector(n) for n in (bound.lora_bias_name, bound.magnitude_name, bound.bias_name))
        return SavedLinear(a, b, bound.scale, *vectors)

    def embedding(self, bound: BoundEmbedding) -> SavedEmbedding:
        b, a = self._pair(bound.b_name, bound.a_name, transpose_first=True)
        return SavedEmbedding(a, b, bound.scale, self._vector(bound.magnitude_name))

    def delta(self, bound: BoundDelta | BoundExperts) -> SavedDelta:
        """PEFT lays lora_A out as [expert, rank] rows and lora_B as [rank, expert] columns."""
        if isinstance(bound, BoundExperts):
            return stack_experts(bound, self.linear)
        a, b = self._pair(bound.a_name, bound.b_name)  # [E * rank, in], [rank * E, out]
        num_in, num_out = a.shape[1], b.shape[1]
        experts = b.view(bound.rank, bound.num_experts, num_out).transpose(0, 1).contiguous()
        return SavedDelta(a.view(bound.num_experts, bound.rank, num_in), experts, bound.scale)

    def tokens(self, bound: BoundTokens) -> SavedTokens:
        return SavedTokens(bound.token_ids, self.tensor(bound.name))

    def tensor(self, name: str) -> Tensor:
        """A copy in the host's dtype."""
        view: Tensor = self._file.get_tensor(name)
        return copy_of(view, HOST_DTYPES[view.dtype])

    def _vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self.tensor(name).float()

    def _pair(self, first: str, second: str, *, transpose_first: bool = False) -> tuple[Tensor, Tensor]:
        """Two factors in the wider of their dtypes, the second transposed (and the first too, if asked)."""
        views = [self._file.get_tensor(first), self._file.get_tensor(second)]
        dtype = torch.promote_types(*(HOST_DTYPES[view.dtype] for view in views))
        return copy_of(views[0].t() if transpose_first else views[0], dtype), copy_of(views[1].t(), dtype)
