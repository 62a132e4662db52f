"""A trainer's adapter as tensors in host memory: one frozen type per way of changing a module.

Layers of methods other than LoRA are converted to the same types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.bound import BoundConversion, Conversions
from lora_serve.adapters.checkpoint.content import DUMMY_DIGEST, DUMMY_RANK
from lora_serve.adapters.checkpoint.methods import GAIN_METHODS, METHODS
from lora_serve.adapters.checkpoint.methods.factors import Array, Arrays, Factors, compress
from lora_serve.adapters.checkpoint.methods.vera import VeraPlan
from lora_serve.core.errors import InvalidAdapterError
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
    """The adapter of zeros (`content.py`): A [rank, in] and B [rank, out] for every linear layer."""
    linears = {
        name: SavedLinear(torch.zeros(DUMMY_RANK, shape.in_features), torch.zeros(DUMMY_RANK, shape.out_features), 1.0)
        for name, shape in spec.linears.items()
    }
    return SavedAdapter(DUMMY_DIGEST, linears)


def convert(conversions: Conversions, read: Callable[[str], Tensor], max_rank: int | None) -> dict[str, SavedLinear]:
    """The layers by module path; factors of a rank above `max_rank` are compressed if that loses nothing.

    `read`: a tensor by its name, in the file's own dtype. Raises InvalidAdapterError with the errors at the ranks
    tried.
    """
    plan = conversions.plan
    drawn = projection(plan) if isinstance(plan, VeraPlan) and not plan.config.save_projection else {}
    array_of = functools.lru_cache(maxsize=4)(lambda name: to_array(read(name)))  # VeRA's layers share two tensors
    found: dict[str, SavedLinear] = {}
    reasons: list[str] = []
    for path, bound in conversions.modules.items():
        arrays: Arrays = {role: array_of(name) for role, name in bound.names.items()} | drawn
        try:
            linear = _linear(conversions, path, bound, arrays, max_rank)
        except InvalidAdapterError as error:
            reasons += error.reasons
        else:
            found |= {} if linear is None else {conversions.path_of.get(path, path): linear}
    if reasons:
        raise InvalidAdapterError(reasons)
    return found


def _linear(
    conversions: Conversions, path: str, bound: BoundConversion, arrays: Arrays, max_rank: int | None
) -> SavedLinear | None:
    """The layer; None if nothing is left of its delta (AdaLoRA pruned it away)."""
    if conversions.peft_type in GAIN_METHODS:
        gains = GAIN_METHODS[conversions.peft_type].gains(conversions.plan, path, arrays)
        vectors = [None if gain is None else torch.from_numpy(gain) for gain in (gains.input, gains.output)]
        return SavedLinear(input_gain=vectors[0], output_gain=vectors[1])
    if bound.rank == 0:
        return None
    method, shape = METHODS[conversions.peft_type], bound.shape
    factors = method.factors(conversions.plan, path, arrays, shape.in_features, shape.out_features)
    factors = factors if max_rank is None else _within(factors, max_rank, path)
    return SavedLinear(torch.from_numpy(factors.a), torch.from_numpy(factors.b), factors.scale)


def _within(factors: Factors, max_rank: int, path: str) -> Factors:
    compression = compress(factors, max_rank)
    if compression.factors is None:
        tried = "; ".join(f"rank {rank}: relative error {error:.2g}" for rank, error in compression.errors)
        raise InvalidAdapterError([f"{path} has no LoRA of --max-lora-rank {max_rank}: {compression.reason} ({tried})"])
    return compression.factors


def to_array(tensor: Tensor) -> npt.NDArray[np.float32]:
    """An exact float32 copy of a float32, float16 or bfloat16 CPU tensor, made on this thread alone."""
    if tensor.dtype == torch.bfloat16:
        return (tensor.contiguous().view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    array: npt.NDArray[np.float32] = tensor.numpy().astype(np.float32)
    return array


def projection(plan: VeraPlan) -> dict[str, Array]:
    """vera_A [r, in_features] and vera_B [out_features, r] of an adapter saved without them, float32.

    PEFT draws them from torch's CPU generator (Mersenne Twister) seeded with `projection_prng_key`, A first, each
    Kaiming-uniform: peft/tuners/vera/model.py `_init_vera_A_vera_B`. As reproducible as torch's `uniform_` is.
    """
    generator = torch.Generator(device="cpu").manual_seed(plan.config.projection_prng_key)
    return {
        "vera_A": _kaiming_uniform(plan.config.r, plan.in_features, generator),
        "vera_B": _kaiming_uniform(plan.out_features, plan.config.r, generator),
    }


def _kaiming_uniform(rows: int, columns: int, generator: torch.Generator) -> Array:
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns))
    matrix: Array = torch.empty(rows, columns, dtype=torch.float32).uniform_(-bound, bound, generator=generator).numpy()
    return matrix
