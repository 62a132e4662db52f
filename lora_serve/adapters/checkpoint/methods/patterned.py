"""The rank and alpha settings that LoHa and LoKr share (peft/tuners/lycoris_utils.py), which are LoRA's by meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.checkpoint.methods.settings import Settings
from lora_serve.adapters.checkpoint.patterns.rank_rules import RankRules, ranks_and_scales
from lora_serve.core.model_spec import LinearShape

PATTERN_KEYS = frozenset(["alpha", "alpha_pattern", "r", "rank_pattern"])


@dataclass(frozen=True, slots=True)
class PatternedPlan:
    """module -> (rank, alpha / rank)."""

    modules: Mapping[str, tuple[int, float]]


def read(settings: Settings) -> RankRules:
    """As LoRA's, under `alpha` instead of `lora_alpha`. Raises InvalidAdapterError with every reason found."""
    rules = RankRules(settings.rank("r"), settings.number("alpha"), settings.rank_pattern(), settings.alpha_pattern())
    settings.finish()
    return rules


def plan(config: RankRules, targets: Mapping[str, LinearShape]) -> PatternedPlan:
    """Match the patterns once for all modules. Raises InvalidAdapterError (see patterns.py)."""
    return PatternedPlan(ranks_and_scales(config, tuple(targets)))
