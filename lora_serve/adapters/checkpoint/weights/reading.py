"""An adapter's tensors, as the trainer saved them, in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.artifact import Artifact, parse_artifact
from lora_serve.adapters.checkpoint.binding.bound import (
    BoundAdapter,
    BoundDelta,
    BoundEmbedding,
    BoundExperts,
    BoundLinear,
    BoundTokens,
)
from lora_serve.adapters.checkpoint.content import AdapterContent
from lora_serve.adapters.checkpoint.weights.conversion import convert
from lora_serve.adapters.checkpoint.weights.saved import (
    SavedAdapter,
    SavedDelta,
    SavedEmbedding,
    SavedLinear,
    SavedTokens,
)
from lora_serve.adapters.checkpoint.weights.weights_file import HOST_DTYPES, WeightsFile, bits_of, copy_of, open_weights
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec


def parse_checked(content: AdapterContent, adapter: AdapterRef, spec: ModelSpec) -> SavedAdapter:
    """The tensors of a registered adapter. Raises InvalidAdapterError."""
    if adapter.traits.base not in ("", spec.fingerprint):
        raise InvalidAdapterError([f"it was registered for another base model than {spec.name}: register it again"])
    file = WeightsFile(content.weights)
    artifact = parse_artifact(content, file.tensors, spec)
    if artifact.config.init:  # a registration stores it as plain LoRA
        raise InvalidAdapterError([f"its {artifact.config.init} initialisation was not undone: register it again"])
    return _saved(file, artifact, adapter.name, adapter.rank or None)


def read_weights(
    folder: Path,
    artifact: Artifact,
    name: str = "",
    max_rank: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> SavedAdapter:
    """The tensors of a folder that was checked. `max_rank`: for what is converted to LoRA (None: whatever is exact).

    `check`: called at every tensor. Raises InvalidAdapterError, OSError, what `check` raises.
    """
    return _saved(open_weights(folder, check), artifact, name, max_rank)


def _saved(file: WeightsFile, artifact: Artifact, name: str, max_rank: int | None) -> SavedAdapter:
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


class _Reader:
    """Copies tensors out of an open file."""

    def __init__(self, file: WeightsFile) -> None:
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


def stack_experts(bound: BoundExperts, read: Callable[[BoundLinear], SavedLinear]) -> SavedDelta:
    """The parts' ranks beside each other, and in B zeros between them:

    [W1 + B1^T A1; W2 + B2^T A2] = [W1; W2] + [B1 0; 0 B2]^T [A1; A2], where the semicolon stacks rows.

    What an expert lacks (a part that is not trained, a rank below that of others) is zero. One scale serves all: a
    part's own one is worked into its B, in float32, where it is another.
    """
    parts = [{expert: read(linear) for expert, linear in part.items()} for part in bound.parts]
    dtype = _dtype([linear for part in parts for linear in part.values()], bound.scale)
    num_out = bound.shape.out_features
    a = _zeros((bound.num_experts, bound.rank, bound.shape.in_features), dtype)
    b = _zeros((bound.num_experts, bound.rank, num_out * len(parts)), dtype)
    first_rank = 0
    for number, part in enumerate(parts):
        columns = slice(number * num_out, (number + 1) * num_out)
        for expert, linear in part.items():
            own_a, own_b = _factors(linear, bound.scale, dtype)
            rows = slice(first_rank, first_rank + len(own_a))
            bits_of(a)[expert, rows] = bits_of(own_a)
            bits_of(b)[expert, rows, columns] = bits_of(own_b)
        first_rank += max((linear.rank for linear in bound.parts[number].values()), default=0)
    return SavedDelta(a, b, bound.scale)


def _dtype(linears: Iterable[SavedLinear], scale: float) -> torch.dtype:
    dtypes = [factor.dtype for linear in linears for factor in (linear.a, linear.b) if factor is not None]
    rescaled = [torch.float32 for linear in linears if linear.scale != scale]
    return functools.reduce(torch.promote_types, [*dtypes, *rescaled])


def _factors(linear: SavedLinear, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert linear.a is not None
    assert linear.b is not None
    a, b = linear.a.to(dtype), linear.b.to(dtype)
    return a, b if linear.scale == scale else b * (linear.scale / scale)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """By numpy, which starts no threads and touches no page before it is written (see `copy_of`)."""
    return torch.from_numpy(np.zeros(shape, f"int{8 * dtype.itemsize}")).view(dtype)
