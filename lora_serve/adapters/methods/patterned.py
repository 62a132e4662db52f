"""The rank and alpha settings that LoHa and LoKr share (peft/tuners/lycoris_utils.py), which are LoRA's by meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.methods.settings import Settings
from lora_serve.adapters.peft_config import LoraConfig
from lora_serve.adapters.targets import ranks_and_scales
from lora_serve.core.model_spec import LinearShape

PATTERN_KEYS = frozenset(["alpha", "alpha_pattern", "r", "rank_pattern"])


@dataclass(frozen=True, slots=True)
class PatternedConfig:
    """Patterns keep their order: the first that matches counts."""

    r: int
    alpha: float
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PatternedPlan:
    """module -> (rank, alpha / rank)."""

    modules: Mapping[str, tuple[int, float]]


def read(settings: Settings) -> PatternedConfig:
    return PatternedConfig(
        r=settings.rank("r"),
        alpha=settings.number("alpha"),
        rank_pattern=settings.rank_pattern(),
        alpha_pattern=settings.alpha_pattern(),
    )


def plan(config: PatternedConfig, targets: Mapping[str, LinearShape]) -> PatternedPlan:
    """Match the patterns once for all modules. Raises InvalidAdapterError (see patterns.py)."""
    lora = LoraConfig(
        r=config.r,
        alpha=config.alpha,
        use_rslora=False,
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
        target_modules=(),
        exclude_modules=(),
        layers_to_transform=None,
        layers_pattern=(),
        base_model="",
        ignored=(),
    )
    return PatternedPlan(ranks_and_scales(lora, tuple(targets)))
