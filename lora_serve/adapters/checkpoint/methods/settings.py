"""A method's own settings out of a parsed adapter_config.json, by allow-list."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from lora_serve.adapters.checkpoint.patterns.rank_rules import RankRules, ranks_and_scales
from lora_serve.adapters.checkpoint.peft_fields import MAX_PATTERNS, Fields, show, words
from lora_serve.core.model_spec import LinearShape

# Keys that every method has: which modules are meant and what else was saved. `peft_config` reads them.
SHARED = words(
    "auto_mapping base_model_name_or_path bias exclude_modules inference_mode layers_pattern "
    "layers_to_transform modules_to_save peft_type peft_version revision runtime_config target_modules "
    "task_type"
)


class Settings(Fields):
    """The values of a method's own keys; any key that is neither its own nor shared is refused."""

    def __init__(self, table: Mapping[str, Any], peft_type: str, known: Set[str]) -> None:
        super().__init__(table)
        found = table.get("peft_type")
        self.require(found == peft_type, f"peft_type is {show(found)}, not {peft_type}")
        self.require_known(known | SHARED)

    def names_or_regex(self, key: str) -> tuple[str, ...] | str:
        """A list of names, perhaps empty, or one regex."""
        value = self.table.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and len(value) <= MAX_PATTERNS and all(isinstance(name, str) for name in value):
            return tuple(value)
        self.reasons.append(f"{key} must list names or be a regex (got {show(value)})")
        return ()


# The rank and alpha settings that LoHa and LoKr share (peft/tuners/lycoris_utils.py), which are LoRA's by meaning.
PATTERN_KEYS = words("alpha alpha_pattern r rank_pattern")


@dataclass(frozen=True, slots=True)
class PatternedPlan:
    """module -> (rank, alpha / rank)."""

    modules: Mapping[str, tuple[int, float]]


def read(settings: Settings) -> RankRules:
    """The rules, with `alpha` in place of `lora_alpha`. Raises InvalidAdapterError with every reason found."""
    rules = RankRules(settings.rank("r"), settings.number("alpha"), settings.rank_pattern(), settings.alpha_pattern())
    settings.finish()
    return rules


def plan(config: RankRules, targets: Mapping[str, LinearShape]) -> PatternedPlan:
    """Match the patterns once for all modules. Raises InvalidAdapterError (see patterns/patterns.py)."""
    return PatternedPlan(ranks_and_scales(config, tuple(targets)))
