"""Seeded checkpoints of random weights in named shapes: they cost what trained ones cost. No tensor is made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RANKS = (8, 16, 32)
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB_SIZE = 49152  # of all shapes below 1b


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shape; `sizes` are fields of the transformers configuration of `model_type`."""

    model_type: str
    sizes: Mapping[str, int | float]
    vocab_size: int = VOCAB_SIZE
    is_tied: bool = True  # the embedding is the head as well
    max_positions: int = 2048


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int | float]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape("llama", _sizes(64, 128, 2, 4, 2)),  # for trying things out
    "4m": ModelShape("llama", _sizes(192, 512, 8, 6, 2)),  # for many short requests: what is measured is the scheduler
    "38m": ModelShape("llama", _sizes(384, 1024, 12, 6, 2)),  # for a thousand adapters: 2.6 MB each at rank 16
    "135m": ModelShape("llama", _sizes(576, 1536, 30, 9, 3)),  # SmolLM-135M
    "0.5b": ModelShape(
        "qwen2", _sizes(896, 4864, 24, 14, 2), max_positions=8192
    ),  # Qwen2-0.5B; 0.40B with this vocabulary
    "1b": ModelShape(
        "llama", {**_sizes(2048, 8192, 16, 32, 8), "head_dim": 64}, 128_256, max_positions=8192
    ),  # Llama-3.2-1B
    "8b": ModelShape(
        "llama", _sizes(4096, 14336, 32, 32, 8), 128_256, is_tied=False, max_positions=8192
    ),  # Llama-3.1-8B
}
