"""Formats of reasoning: one file per format, whose name is the value of --reasoning-parser (vLLM's names)."""

from __future__ import annotations

import importlib

from lora_serve.core.setting_types import REASONING_ALIASES, names_in
from lora_serve.text.reasoning.base import ReasoningFormat


def names() -> tuple[str, ...]:
    """The names of all formats, other names of the same included."""
    return tuple(sorted((*names_in("text/reasoning"), *REASONING_ALIASES)))


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of one of `names()`."""
    module = importlib.import_module(f"{__name__}.{REASONING_ALIASES.get(name, name)}")
    found: ReasoningFormat = module.Format()
    return found


def found_in(template: str) -> ReasoningFormat | None:
    """The format in which a chat template (its Jinja text) has reasoning; None if no format, or more than one, fits."""
    formats = map(reasoning_format, names_in("text/reasoning"))
    matching = [candidate for candidate in formats if candidate.matches(template)]
    return matching[0] if len(matching) == 1 else None
