"""What the chart's schema and its templates refuse, in words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.wrong_values import WRONG


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_in_words(said: tuple[dict[str, Any], Any], name: str) -> None:
    answer = said[0][f"wrong: {name}"]
    assert isinstance(answer, str), f"{name} was rendered"
    assert WRONG[name][1] in answer
