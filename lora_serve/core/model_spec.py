"""The base model as plain facts, for every floor that must know its shape without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer that LoRA can target: y [out_features] = W x [in_features]."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What can be known of a loaded base model."""

    name: str  # folder or hub id
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...]
    num_layers: int
    linears: Mapping[str, LinearShape]  # module path, e.g. "model.layers.0.self_attn.q_proj"
    num_bytes: int  # resident weight bytes
    dtype: str  # e.g. "float32"
    device: str  # e.g. "cpu"
