"""Seeded checkpoints of random weights in named shapes: they cost what trained ones cost. No tensor is made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RANKS = (8, 16, 32)
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB_SIZE = 49152  # of all shapes below 1b
_FEW_WORDS = 16384  # where the head shall be as small a part of the model as it is in large ones


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shape; `sizes` are fields of the transformers configuration of `model_type`."""

    model_type: str
    sizes: Mapping[str, int | float | bool]
    vocab_size: int = VOCAB_SIZE
    is_tied: bool = True  # the embedding is the head as well
    max_positions: int = 2048


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int | float | bool]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _latent(q_rank: int, kv_rank: int, own: int, rotated: int, value: int) -> dict[str, int]:
    """Multi-head latent attention: ranks of queries and of keys and values; numbers of a head."""
    return {
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": own,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
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
    # Newer kinds, in their proportions but with fewer and narrower layers.
    "gpt-oss": ModelShape(
        "gpt_oss", {**_sizes(640, 640, 6, 16, 2), "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
        _FEW_WORDS, is_tied=False, max_positions=8192,
    ),  # gpt-oss-20b: 0.27B
    "qwen3-moe": ModelShape(
        "qwen3_moe",
        {**_sizes(512, 1536, 6, 16, 2), "head_dim": 64, "moe_intermediate_size": 192, "num_experts": 128,
         "num_experts_per_tok": 8, "norm_topk_prob": True},
        _FEW_WORDS, is_tied=False,
    ),  # Qwen3-30B-A3B: 0.25B
    "deepseek-v3": ModelShape(
        "deepseek_v3",
        {**_sizes(512, 1280, 7, 8, 8), **_latent(128, 64, 128, 64, 128), "moe_intermediate_size": 160,
         "n_routed_experts": 128, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1},
        _FEW_WORDS, is_tied=False,
    ),  # DeepSeek V3: 0.22B
    "glm4-moe-lite": ModelShape(
        "glm4_moe_lite",
        {**_sizes(512, 2560, 6, 5, 5), **_latent(192, 128, 192, 64, 256), "moe_intermediate_size": 384,
         "n_routed_experts": 64, "num_experts_per_tok": 4},
        _FEW_WORDS, is_tied=False,
    ),  # GLM-4.7-Flash: 0.22B
    "gemma4": ModelShape(
        "gemma4_text",
        {**_sizes(640, 2560, 18, 4, 1), "head_dim": 128, "global_head_dim": 256, "hidden_size_per_layer_input": 64,
         "vocab_size_per_layer_input": _FEW_WORDS, "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
        _FEW_WORDS,
    ),  # Gemma 4 E2B, whose last layers read the keys of others: 0.17B
}  # fmt: skip
