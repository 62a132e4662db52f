"""AdaLoRA: a LoRA with trained singular values whose rank was pruned per layer (Zhang et al.,
https://arxiv.org/abs/2303.10512).

delta_W = alpha / (init_r + 1e-5) * B diag(E) A, with A [rank, in], E [rank, 1], B [out, rank], where rank counts the
directions that `rank_pattern` keeps: a LoRA of that rank, maybe 0. PEFT divides by the rank before pruning, plus its
1e-5, and takes the rank itself for an alpha that is not positive (peft/tuners/adalora/layer.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lora_serve.adapters.checkpoint.methods.factors import Arrays, Factors, Shapes, misfits, rounded, tensor_names, wide
from lora_serve.adapters.checkpoint.peft_fields import MethodFields, show, words
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import LinearShape

PEFT_TYPE = "ADALORA"
# The schedule of the pruning, start values, and settings inherited from LoRA that PEFT's AdaLoRA layers never read.
HARMLESS = words(
    "alpha_pattern beta1 beta2 deltaT fan_in_fan_out init_lora_weights lora_dropout megatron_core "
    "orth_reg_weight qalora_group_size r target_r tfinal tinit total_step use_rslora"
)
UNDERSTOOD = words("init_r lora_alpha rank_pattern")
ROLES = tensor_names("lora_[ABE]")
_PATTERN_KEY = re.compile(r"(?P<module>.+)\.lora_E(?:\.default)?\Z")


@dataclass(frozen=True, slots=True)
class AdaLoraConfig:
    init_r: int
    alpha: float
    ranks: Mapping[str, int]  # module -> directions kept; init_r for any other

    def rank(self, module: str) -> int:
        return self.ranks.get(module, self.init_r)

    def scale(self, module: str) -> float:
        return (self.alpha if self.alpha > 0 else float(self.rank(module))) / (self.init_r + 1e-5)


def parse(table: Mapping[str, Any]) -> AdaLoraConfig:
    settings = MethodFields(table, PEFT_TYPE, HARMLESS | UNDERSTOOD)
    if table.get("r") is not None:
        settings.integer("r")  # LoRA's, which AdaLoRA does not read
    init_r, alpha = settings.rank("init_r"), settings.number("lora_alpha")
    config = AdaLoraConfig(init_r, alpha, MappingProxyType(_ranks(settings, init_r)))
    settings.finish()
    return config


def plan(config: AdaLoraConfig, targets: Mapping[str, LinearShape]) -> AdaLoraConfig:
    """Raises InvalidAdapterError if rank_pattern names a module that is not targeted."""
    unknown = sorted(config.ranks.keys() - targets.keys())
    if unknown:
        raise InvalidAdapterError([f"rank_pattern names {module[:200]!r}, which is not adapted" for module in unknown])
    return config


def bind(plan: AdaLoraConfig, module: str, shapes: Shapes, in_features: int, out_features: int) -> int | list[str]:
    rank = plan.rank(module)
    expected = {"lora_A": (rank, in_features), "lora_B": (out_features, rank), "lora_E": (rank, 1)}
    return misfits(module, shapes, expected) or rank


def factors(plan: AdaLoraConfig, module: str, tensors: Arrays, in_features: int, out_features: int) -> Factors:
    parts = wide(tensors)
    return rounded(parts["lora_A"] * parts["lora_E"], parts["lora_B"].T, plan.scale(module), module)


def _ranks(settings: MethodFields, init_r: int) -> dict[str, int]:
    """rank_pattern: "<module>.lora_E" -> for each of the init_r directions, whether it was kept."""
    ranks = {}
    for key, mask in settings.mapping("rank_pattern"):
        match = _PATTERN_KEY.match(key)
        if match is None or match["module"] in ranks or not _is_mask(mask, init_r):
            settings.reasons.append(
                f"rank_pattern[{key[:100]!r}] must list {init_r} times true or false for one lora_E (got {show(mask)})"
            )
        else:
            ranks[match["module"]] = sum(mask)
    return ranks


def _is_mask(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(isinstance(kept, bool) for kept in value)
