"""Takes one PEFT method's settings out of a parsed adapter_config.json, by allow-list, and collects what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from lora_serve.adapters.peft_config import MAX_PATTERNS
from lora_serve.core.errors import InvalidAdapterError

# Keys that every method has: which modules are meant and what else was saved. They are not read here.
SHARED = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    ]
)


class Settings:
    """The table's values by type; `finish` raises InvalidAdapterError with every reason found."""

    def __init__(self, table: Mapping[str, Any], peft_type: str, known: Set[str]) -> None:
        self.table = table
        self.reasons: list[str] = []
        self.require(
            table.get("peft_type") == peft_type, f"peft_type is {show(table.get('peft_type'))}, not {peft_type}"
        )
        for key in table.keys() - known - SHARED:
            self.require(
                is_empty(table[key]), f"unknown setting {key[:100]!r} = {show(table[key])} may change the result"
            )

    def finish(self) -> None:
        if self.reasons:
            raise InvalidAdapterError(sorted(self.reasons))

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            self.reasons.append(reason)

    def rank(self, key: str) -> int:
        return self._rank(key, self.table.get(key))

    def number(self, key: str) -> float:
        return self._number(key, self.table.get(key))

    def integer(self, key: str) -> int:
        value = self.table.get(key)
        self.require(type(value) is int, f"{key} must be an integer (got {show(value)})")
        return value if type(value) is int else 0

    def flag(self, key: str, default: bool) -> bool:
        value = self.table.get(key, default)
        self.require(isinstance(value, bool), f"{key} must be true or false (got {show(value)})")
        return value is True

    def names(self, key: str) -> tuple[str, ...] | str:
        """A list of names, or one regex."""
        value = self.table.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and len(value) <= MAX_PATTERNS and all(isinstance(name, str) for name in value):
            return tuple(value)
        self.reasons.append(f"{key} must list names or be a regex (got {show(value)})")
        return ()

    def rank_pattern(self) -> tuple[tuple[str, int], ...]:
        return tuple((key, self._rank(f"rank_pattern[{key[:100]!r}]", n)) for key, n in self.mapping("rank_pattern"))

    def alpha_pattern(self) -> tuple[tuple[str, float], ...]:
        items = self.mapping("alpha_pattern")
        return tuple((key, self._number(f"alpha_pattern[{key[:100]!r}]", n)) for key, n in items)

    def mapping(self, key: str) -> list[tuple[str, Any]]:
        value = self.table.get(key) or {}
        if isinstance(value, dict) and len(value) <= MAX_PATTERNS:
            return list(value.items())
        self.reasons.append(f"{key} must be a table of at most {MAX_PATTERNS} entries")
        return []

    def _rank(self, key: str, value: Any) -> int:
        if type(value) is int and 1 <= value < 2**31:
            return value
        self.reasons.append(f"{key} must be a positive integer (got {show(value)})")
        return 1

    def _number(self, key: str, value: Any) -> float:
        if type(value) in (int, float) and abs(value) < 1e6:
            return float(value)
        self.reasons.append(f"{key} must be a finite number (got {show(value)})")
        return 1.0


def is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (type(value) in (int, float) and value == 0)


def show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
