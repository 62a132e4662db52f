"""(IA)^3: trained gains on a layer's inputs or outputs (Liu et al., https://arxiv.org/abs/2205.05638).

A feed-forward module: y = W (gain * x) + bias. Any other: y = gain * (W x + bias), the base layer's bias included.
These are no low-rank deltas, so there are gains in place of factors. Source: peft/tuners/ia3/layer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_serve.adapters.checkpoint.methods.factors import Arrays, Shapes, misfits, tensor_names
from lora_serve.adapters.checkpoint.module_patterns import Pattern, match_names
from lora_serve.adapters.checkpoint.peft_fields import MethodFields, words
from lora_serve.core.model_spec import LinearShape

PEFT_TYPE = "IA3"
HARMLESS = words("fan_in_fan_out init_ia3_weights")
UNDERSTOOD = words("feedforward_modules")
ROLES = tensor_names("ia3_l")


@dataclass(frozen=True, slots=True)
class Gains:
    """y = output * (W (input * x) + bias); None: all ones. Exactly one of the two is there."""

    input: npt.NDArray[np.float32] | None  # [in_features]
    output: npt.NDArray[np.float32] | None  # [out_features]


def parse(table: Mapping[str, Any]) -> tuple[str, ...] | str:
    """The feed-forward modules: endings of their paths, or a regex."""
    settings = MethodFields(table, PEFT_TYPE, HARMLESS | UNDERSTOOD)
    endings = settings.names_or_regex("feedforward_modules")
    settings.finish()
    return endings


def plan(config: tuple[str, ...] | str, targets: Mapping[str, LinearShape]) -> frozenset[str]:
    """The modules whose inputs are scaled. Raises InvalidAdapterError (see checkpoint/module_patterns.py)."""
    if isinstance(config, str):
        return match_names([Pattern(config, whole=True)], tuple(targets))[0]
    # PEFT asks for no dot before the ending here, unlike for target_modules.
    return frozenset(module for module in targets if module.endswith(config))


def bind(plan: frozenset[str], module: str, shapes: Shapes, in_features: int, out_features: int) -> int | list[str]:
    """0 (there is no low-rank delta), or why the shapes do not fit."""
    expected = (1, in_features) if module in plan else (out_features, 1)
    return misfits(module, shapes, {"ia3_l": expected}) or 0


def gains(plan: frozenset[str], module: str, tensors: Arrays) -> Gains:
    gain = np.ascontiguousarray(tensors["ia3_l"], dtype=np.float32).reshape(-1)
    return Gains(gain, None) if module in plan else Gains(None, gain)
