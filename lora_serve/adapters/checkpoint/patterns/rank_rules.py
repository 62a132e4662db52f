"""Each module's rank and scale by PEFT's own rules (peft/utils/other.py `get_pattern_key`), tested against PEFT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.adapters.checkpoint.patterns.patterns import Pattern, match_names


@dataclass(frozen=True, slots=True)
class RankRules:
    """A rank and an alpha, and patterns for other ones; of those the first that matches a module counts."""

    r: int
    alpha: float
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    use_rslora: bool = False

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA (https://arxiv.org/abs/2312.03732)."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @property
    def largest(self) -> int:
        return max([self.r, *(rank for _, rank in self.rank_pattern)])


def ranks_and_scales(rules: RankRules, modules: Sequence[str]) -> dict[str, tuple[int, float]]:
    """module -> (rank, scale). Raises InvalidAdapterError (see patterns/patterns.py)."""
    ranks = _first_match(rules.rank_pattern, modules)
    alphas = _first_match(rules.alpha_pattern, modules)
    table = {}
    for module in modules:
        rank = int(ranks.get(module, rules.r))
        table[module] = rank, rules.scale(rank, alphas.get(module, rules.alpha))
    return table


def _first_match(patterns: Sequence[tuple[str, float]], modules: Sequence[str]) -> dict[str, float]:
    expressions = [Pattern(key, whole=False) for key, _ in patterns]
    found: dict[str, float] = {}
    for matched, (_, value) in zip(match_names(expressions, modules), patterns, strict=True):
        for module in matched:
            found.setdefault(module, value)
    return found
