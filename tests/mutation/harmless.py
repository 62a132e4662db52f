"""Mutants that nobody can tell from the program, each with the reason: tests/mutation/harmless.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("harmless.toml")


def listed() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads(FILE.read_text()).get("mutant", [])
    return entries


def reasons() -> dict[tuple[str, str, str, int], str]:
    """The reason by a mutant's key; `nth` is 0 where it is not said."""
    return {(one["file"], one["text"], one["operator"], one.get("nth", 0)): one["reason"] for one in listed()}
