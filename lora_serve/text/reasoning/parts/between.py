"""Reasoning at the answer's beginning, between a marker that opens it and one that closes it."""

from __future__ import annotations

from typing import ClassVar

from lora_serve.text.pieces import Reader, Reading
from lora_serve.text.reasoning.base import ReasoningEvent, ReasoningFormat, ReasoningParser, ReasoningText
from lora_serve.text.tool_calls.base import ContentText


class BetweenMarkers(ReasoningFormat):
    """Format that one of `opening` begins, after white space at most, and one of `closing` ends."""

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[tuple[str, ...]]

    @classmethod
    def matches(cls, template: str) -> bool:
        return any(marker in template for marker in cls.opening) and any(marker in template for marker in cls.closing)

    def is_open_after(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(tuple(marker.rstrip() for marker in self.opening))

    def parser(self, starts_inside: bool) -> ReasoningParser:
        return _Parser(self.opening, self.closing, starts_inside)


class _Parser(ReasoningParser):
    def __init__(self, opening: tuple[str, ...], closing: tuple[str, ...], starts_inside: bool) -> None:
        self._opening = opening
        self._closing = closing
        self._starts_inside = starts_inside
        self._reader = Reader()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._reading = self._read()

    def feed(self, text: str) -> list[ReasoningEvent]:
        self._reader.append(text)
        return self._advanced()

    def finish(self) -> list[ReasoningEvent]:
        self._reader.end()
        return self._advanced()

    def _read(self) -> Reading[None]:
        """Read the whole answer. A marker that the prompt has written may be written again, and is dropped then."""
        reader = self._reader
        reader.hold()
        yield from reader.spaces()
        is_opened = (yield from reader.literal(*self._opening)) != ""
        held = reader.let_go()
        if is_opened or self._starts_inside:
            self._reasoning.append("" if is_opened else held)
            yield from reader.until(self._closing, self._reasoning.append)
        else:
            self._content.append(held)
        yield from reader.until((), self._content.append)

    def _advanced(self) -> list[ReasoningEvent]:
        next(self._reading, None)
        events: list[ReasoningEvent] = []
        if reasoning := "".join(self._reasoning):
            events.append(ReasoningText(reasoning))
        if content := "".join(self._content):
            events.append(ContentText(content))
        self._reasoning.clear()
        self._content.clear()
        return events
