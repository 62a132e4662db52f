"""Of the attempts at a limit of time, one must hold; a fault that shows at each of them is told."""

from __future__ import annotations

import pytest

from tests.attempts import NUM_ATTEMPTS, in_some_attempt


@pytest.mark.parametrize(("times", "num_asked"), [([1], 1), ([9, 1], 2), ([9, 9, 1], 3)])
def test_the_first_attempt_that_holds_is_the_last(times: list[int], num_asked: int) -> None:
    asked: list[int] = []

    def check() -> str:
        asked.append(times[len(asked)])
        assert asked[-1] < 5
        return "held"

    assert in_some_attempt(check) == "held"
    assert len(asked) == num_asked


def test_what_holds_at_none_fails() -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(9)
        assert asked[-1] < 5

    with pytest.raises(AssertionError):
        in_some_attempt(check)
    assert len(asked) == NUM_ATTEMPTS


def test_another_error_is_told_at_once() -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(9)
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        in_some_attempt(check)
    assert len(asked) == 1
