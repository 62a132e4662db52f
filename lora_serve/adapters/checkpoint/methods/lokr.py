"""LoKr: the Kronecker product of two small matrices (Yeh et al., LyCORIS, https://arxiv.org/abs/2309.14859).

delta_W = alpha / r * kron(w1, w2), each of w1 [o1, i1] and w2 [o2, i2] saved whole or as w_a w_b of rank r.
With w1 = U1 V1 and w2 = U2 V2: kron(w1, w2) = kron(U1, U2) kron(V1, V2), a LoRA whose rank is the product of the
inner dimensions. A whole matrix has its smaller side for inner dimension: U or V is the identity.
alpha / r scales whole matrices too, as in peft/tuners/lokr/layer.py (LyCORIS itself does not).
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
    rounded,
    split,
    tensor_names,
    wide,
)
from lora_serve.adapters.checkpoint.module_patterns import RankRules
from lora_serve.adapters.checkpoint.peft_fields import PATTERN_KEYS, MethodFields, RankTable, plan, read, words

__all__ = ["HARMLESS", "PEFT_TYPE", "ROLES", "UNDERSTOOD", "bind", "factors", "parse", "plan"]

PEFT_TYPE = "LOKR"
# How the layer was cut in two (decompose_*) is read from the tensors' shapes.
HARMLESS = words(
    "decompose_both decompose_factor init_weights module_dropout rank_dropout rank_dropout_scale use_effective_conv2d"
)
UNDERSTOOD = PATTERN_KEYS
ROLES = tensor_names("lokr_w[12](?:_[ab])?|lokr_t2")  # t2: convolutions
_SIDES = ("lokr_w1", "lokr_w2")


def parse(table: Mapping[str, Any]) -> RankRules:
    return read(MethodFields(table, PEFT_TYPE, HARMLESS | UNDERSTOOD))


def bind(plan: RankTable, module: str, shapes: Shapes, in_features: int, out_features: int) -> int | list[str]:
    rank, _ = plan[module]
    reasons = [f"lokr_t2 of {module} does not belong to a linear layer"] if "lokr_t2" in shapes else []
    reasons += [reason for side in _SIDES for reason in _side_misfits(module, side, shapes, rank)]
    if reasons:
        return reasons
    (out_1, in_1), (out_2, in_2) = (_side_shape(side, shapes) for side in _SIDES)
    product, asked = [out_1 * out_2, in_1 * in_2], [out_features, in_features]
    if product != asked:
        return [f"the Kronecker product of {module} has shape {product}, but the base model's layer asks for {asked}"]
    return _inner("lokr_w1", shapes) * _inner("lokr_w2", shapes)


def factors(plan: RankTable, module: str, tensors: Arrays, in_features: int, out_features: int) -> Factors:
    _, scale = plan[module]
    parts = wide(tensors)
    (left_1, right_1), (left_2, right_2) = (_halves(side, parts) for side in _SIDES)
    return rounded(np.kron(right_1, right_2), np.kron(left_1, left_2).T, scale, module)


def _side_misfits(module: str, side: str, shapes: Shapes, rank: int) -> list[str]:
    saved = {role: shapes[role] for role in (side, f"{side}_a", f"{side}_b") if role in shapes}
    if saved.keys() not in ({side}, {f"{side}_a", f"{side}_b"}):
        return [f"{side} of {module} must be there whole or as {side}_a and {side}_b (got {sorted(saved)})"]
    reasons = [
        f"{role} of {module} has shape {list(shape)}, not two positive dimensions"
        for role, shape in saved.items()
        if len(shape) != 2 or 0 in shape
    ]
    if not reasons and side not in saved and not saved[f"{side}_a"][1] == saved[f"{side}_b"][0] == rank:
        reasons.append(
            f"{side}_a and {side}_b of {module} have shapes {list(saved[f'{side}_a'])} and "
            f"{list(saved[f'{side}_b'])}, but the config's rank is {rank}"
        )
    return reasons


def _side_shape(side: str, shapes: Shapes) -> tuple[int, int]:
    if side in shapes:
        rows, columns = shapes[side]
    else:
        rows, columns = shapes[f"{side}_a"][0], shapes[f"{side}_b"][1]
    return rows, columns


def _inner(side: str, shapes: Shapes) -> int:
    smaller = min(_side_shape(side, shapes))
    return smaller if side in shapes else min(smaller, shapes[f"{side}_a"][1])


def _halves(side: str, parts: Mapping[str, Array]) -> tuple[Array, Array]:
    if side in parts:
        return split(parts[side])
    left, right = parts[f"{side}_a"], parts[f"{side}_b"]
    return (left, right) if left.shape[1] <= min(left.shape[0], right.shape[1]) else split(left @ right)
