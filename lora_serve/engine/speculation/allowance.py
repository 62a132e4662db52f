"""The time that one owner's guesses may take: next to nothing of the steps' own, until guesses come true.

Looking for guesses costs time whether any is found or not, and so does learning from answers. So each owner has an
account in seconds. Every step that gives one of its rows a token pays in a small share of that row's time, and
guesses that came true half of the time that they saved. Looks and lessons are paid from it; while it is empty there
are none. Where text can be guessed the account stays full and every step is looked at; where it cannot, looks become
as rare as the share pays for: often where steps are long, seldom where they are short.
"""

from __future__ import annotations

SHARE = 1 / 500  # of a row's time in a step
_FIRST, _MOST = 1e-2, 2e-2  # seconds in an account
_LOOK, _ROW, _GUESS, _LESSON = 2e-5, 8e-6, 1e-6, 1e-6  # seconds, about: for a step's look, one row, one token of either


class Allowance:
    """One owner's account. The prices are constants, so that what is guessed does not depend on a disturbed clock."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = _FIRST  # the share of each row's time is added by `scheduling/drafting.py`

    def earn(self, seconds: float) -> None:
        """Pays in for guesses that were run and saved `seconds`. Such as cost more are not charged for here: one step
        that a busy machine held up would empty the account, and `gain.py` ends what does not pay.
        """
        self.seconds += max(0.0, seconds) / 2

    def pay_look(self, num_guessed: int, num_rows: int) -> None:
        """Pays for the guesses at one row, in a step that looks at `num_rows`."""
        self.seconds = min(self.seconds, _MOST) - _LOOK / num_rows - _ROW - num_guessed * _GUESS

    def pay_lesson(self, num_tokens: int) -> None:
        """Pays for the habits learned from so many tokens."""
        self.seconds -= num_tokens * _LESSON
