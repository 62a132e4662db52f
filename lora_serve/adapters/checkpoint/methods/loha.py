"""LoHa: the element-wise product of two low-rank matrices (Hyeon-Woo et al., FedPara, https://arxiv.org/abs/2108.06098).

delta_W = alpha / r * (w1_a w1_b) * (w2_a w2_b), with w1_a, w2_a [out, r] and w1_b, w2_b [r, in]
        = alpha / r * sum over i, j of (w1_a[:, i] * w2_a[:, j]) (w1_b[i] * w2_b[j])^T,

a LoRA of rank r^2, or of the layer's smaller side where that is less. Names: peft/tuners/loha/layer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lora_serve.adapters.checkpoint.methods.factors import (
    Array,
    Arrays,
    Factors,
    Shapes,
    misfits,
    rounded,
    split,
    tensor_names,
    wide,
)
from lora_serve.adapters.checkpoint.module_patterns import RankRules
from lora_serve.adapters.checkpoint.peft_fields import PATTERN_KEYS, MethodFields, RankTable, plan, read, words

__all__ = ["HARMLESS", "PEFT_TYPE", "ROLES", "UNDERSTOOD", "bind", "factors", "parse", "plan"]

PEFT_TYPE = "LOHA"
HARMLESS = words("init_weights module_dropout rank_dropout use_effective_conv2d")
UNDERSTOOD = PATTERN_KEYS
ROLES = tensor_names("hada_w[12]_[ab]|hada_t[12]")  # t: convolutions


def parse(table: Mapping[str, Any]) -> RankRules:
    return read(MethodFields(table, PEFT_TYPE, HARMLESS | UNDERSTOOD))


def bind(plan: RankTable, module: str, shapes: Shapes, in_features: int, out_features: int) -> int | list[str]:
    rank, _ = plan[module]
    left, right = (out_features, rank), (rank, in_features)
    expected = {"hada_w1_a": left, "hada_w1_b": right, "hada_w2_a": left, "hada_w2_b": right}
    return misfits(module, shapes, expected) or min(rank * rank, in_features, out_features)


def factors(plan: RankTable, module: str, tensors: Arrays, in_features: int, out_features: int) -> Factors:
    rank, scale = plan[module]
    parts = wide(tensors)
    w1_a, w1_b, w2_a, w2_b = (parts[f"hada_{name}"] for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
    if rank * rank >= min(in_features, out_features):
        b, a = split((w1_a @ w1_b) * (w2_a @ w2_b))
        return rounded(a, b.T, scale, module)
    return rounded(_all_products(w1_b, w2_b), _all_products(w1_a.T, w2_a.T), scale, module)


def _all_products(first: Array, second: Array) -> Array:
    """The row-wise Khatri-Rao product: [r1, n] and [r2, n] to [r1 * r2, n]."""
    products: Array = (first[:, None, :] * second[None, :, :]).reshape(-1, first.shape[1])
    return np.ascontiguousarray(products)
