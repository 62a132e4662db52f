"""docs/explanation/security.md says only what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "explanation" / "security.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.*) \| (.*?) ?\|$", PAGE, re.M)
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_every_point_has_a_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 21))


def test_every_point_names_a_test_or_says_that_there_is_nothing_to_hold() -> None:
    without = [number for number, promise, held in ROWS if "::" not in held and "no Ray host" not in promise]
    assert without == []


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[name for _, name in TESTS])
def test_every_named_test_is_there(file: str, name: str) -> None:
    assert (ROOT / file).is_file(), file
    defined = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in defined


def test_every_named_flag_is_a_setting() -> None:
    from lora_serve.core.settings import Settings

    known = {"--" + name.replace("_", "-") for name in Settings.model_fields}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known
