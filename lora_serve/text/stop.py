"""Stop strings over a stream of text pieces.

One Knuth-Morris-Pratt automaton per stop string, so the result never depends on where the pieces were cut: the
stop string that is complete first ends the text, and of several that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """What may be shown now, and the stop string that ended the text, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Holds back whatever may still turn out to be the beginning of a stop string; shows none of a stop string.

    With `include` the stop string itself is shown (vLLM's include_stop_str_in_output).
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)  # characters of each stop string matched at the end of the text
        self._held = ""
        self._include = include

    def push(self, piece: str) -> StopResult:
        """Add `piece`; after a match nothing more may be pushed."""
        if not self._stops:
            return StopResult(piece)
        text = self._held + piece
        for index, character in enumerate(piece, start=len(self._held)):
            matched = self._advance(character)
            if matched is not None:
                self._held = ""
                return StopResult(text[: index + 1 - (0 if self._include else len(matched))], matched)
        shown = len(text) - max(self._states)
        self._held = text[shown:]
        return StopResult(text[:shown])

    def flush(self) -> str:
        """The text ended without a stop string: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        matched: str | None = None
        for number, stop in enumerate(self._stops):
            state = self._states[number]
            while state and stop[state] != character:
                state = self._failures[number][state - 1]
            state += stop[state] == character
            if state == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
            self._states[number] = state
        return matched


def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return tuple(table)
