"""Formats of tool calls: one file per format, whose name is the value of --tool-call-parser (vLLM's names)."""

from __future__ import annotations

import importlib

from lora_serve.core.setting_types import TOOL_CALL_ALIASES, names_in
from lora_serve.text.tool_calls.base import ToolCallFormat


def names() -> tuple[str, ...]:
    """The names of all formats, other names of the same included."""
    return tuple(sorted((*names_in("text/tool_calls"), *TOOL_CALL_ALIASES)))


def tool_call_format(name: str) -> ToolCallFormat:
    """The format of one of `names()`."""
    module = importlib.import_module(f"{__name__}.{TOOL_CALL_ALIASES.get(name, name)}")
    found: ToolCallFormat = module.Format()
    return found


def found_in(template: str) -> ToolCallFormat | None:
    """The format in which a chat template (its Jinja text) writes calls; None if no format, or more than one, fits."""
    formats = map(tool_call_format, names_in("text/tool_calls"))
    matching = [candidate for candidate in formats if candidate.matches(template)]
    return matching[0] if len(matching) == 1 else None
