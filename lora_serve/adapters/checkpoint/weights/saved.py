"""A trainer's adapter as tensors in host memory: one frozen type per way of changing a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_serve.adapters.dummy import DUMMY_RANK, dummy_adapter_ref
from lora_serve.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SavedLinear:
    """One linear layer: W x becomes W x + scale * ((x A^T) B + lora_bias), its rows rescaled to `magnitude` (DoRA)."""

    a: Tensor | None = None  # [rank, in_features], contiguous
    b: Tensor | None = None  # [rank, out_features], contiguous: PEFT's lora_B transposed
    scale: float = 0.0  # not folded into a or b: folding would round twice in bfloat16
    lora_bias: Tensor | None = None  # [out_features], lora_B's own
    magnitude: Tensor | None = None  # [out_features]
    bias: Tensor | None = None  # [out_features], in place of the layer's own
    input_gain: Tensor | None = None  # [in_features], (IA)^3's: W (gain * x)
    output_gain: Tensor | None = None  # [out_features], (IA)^3's: gain * (W x + bias)

    @property
    def is_plain(self) -> bool:
        """True if there are A and B and nothing else."""
        rest = (self.lora_bias, self.magnitude, self.bias, self.input_gain, self.output_gain)
        return self.a is not None and self.b is not None and all(tensor is None for tensor in rest)


@dataclass(frozen=True, slots=True)
class SavedEmbedding:
    """One embedding table: W[token] + scale * A[token] B."""

    a: Tensor  # [num_embeddings, rank], contiguous: PEFT's lora_embedding_A transposed
    b: Tensor  # [rank, embedding_dim], contiguous: PEFT's lora_embedding_B transposed
    scale: float
    magnitude: Tensor | None = None  # [embedding_dim]


@dataclass(frozen=True, slots=True)
class SavedDelta:
    """A bare parameter: W[e] + scale * B[e]^T A[e] for each expert e (one, if the parameter is a matrix)."""

    a: Tensor  # [num_experts, rank, in]
    b: Tensor  # [num_experts, rank, out]
    scale: float


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """Rows of an embedding table, in place of its own."""

    token_ids: tuple[int, ...]
    rows: Tensor  # [num_tokens, embedding_dim]


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """One adapter version, by module path as in ModelSpec."""

    digest: str
    name: str
    linears: Mapping[str, SavedLinear]
    embeddings: Mapping[str, SavedEmbedding] = field(default_factory=dict)
    deltas: Mapping[str, Mapping[str, SavedDelta]] = field(default_factory=dict)  # module -> parameter
    tokens: Mapping[str, SavedTokens] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # module -> parameter
    vocab_size: int = 0  # of its own embedding and output head; 0: the base's

    @property
    def is_plain(self) -> bool:
        """True for plain LoRA of linear layers, which is prepared without the base's weights."""
        others = (self.embeddings, self.deltas, self.tokens, self.parameters, self.vocab_size)
        return not any(others) and all(linear.is_plain for linear in self.linears.values())

    @property
    def rank(self) -> int:
        """The largest rank of any module; 0: nothing is low-rank."""
        linears = [linear.a.shape[0] for linear in self.linears.values() if linear.a is not None]
        embeddings = [embedding.b.shape[0] for embedding in self.embeddings.values()]
        deltas = [delta.a.shape[1] for table in self.deltas.values() for delta in table.values()]
        return max([*linears, *embeddings, *deltas], default=0)


def dummy_adapter(spec: ModelSpec) -> SavedAdapter:
    """The adapter of zeros (`adapters/dummy.py`): A [rank, in] and B [rank, out] for every linear layer."""
    ref = dummy_adapter_ref(spec)
    linears = {
        name: SavedLinear(torch.zeros(DUMMY_RANK, shape.in_features), torch.zeros(DUMMY_RANK, shape.out_features), 1.0)
        for name, shape in spec.linears.items()
    }
    return SavedAdapter(ref.digest, ref.name, linears)
