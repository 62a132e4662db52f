"""An adapter's tensors, as the trainer saved them, in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from lora_serve.adapters.checkpoint.weights.expert_weights import stack_experts
from lora_serve.adapters.checkpoint.weights.saved import (
    SavedAdapter,
    SavedDelta,
    SavedEmbedding,
    SavedLinear,
    SavedTokens,
)
from lora_serve.adapters.checkpoint.weights.weights_file import HOST_DTYPES, WeightsFile, copy_of, open_weights
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
