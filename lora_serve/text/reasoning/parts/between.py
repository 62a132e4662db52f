"""Reasoning at the answer's beginning, between a marker that opens it and one that closes it."""

from __future__ import annotations

from typing import ClassVar

from lora_serve.text.pieces import Reader, Reading
from lora_serve.text.reasoning.base import ReasoningEvent, ReasoningFormat, ReasoningParser, ReasoningText
from lora_serve.text.tool_calls.base import ContentText


class BetweenMarkers(ReasoningFormat):
    """Format that one of `opening` begins, after white space at most, and the first of `closing` ends."""

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[tuple[str, ...]]
    skipping: ClassVar[tuple[str, ...]] = ()  # markers that begin an answer without reasoning

    @classmethod
    def matches(cls, template: str) -> bool:
        """The closing marker is enough: templates that cut old reasoning out of messages look for no other."""
        return any(marker in template for marker in cls.closing)

    def is_open_after(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(tuple(marker.rstrip() for marker in self.opening))

    def parser(self, starts_inside: bool) -> ReasoningParser:
        return _Parser(self, starts_inside)


class _Parser(ReasoningParser):
    def __init__(self, form: BetweenMarkers, starts_inside: bool) -> None:
        self._form = form
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
        marker = yield from reader.literal(*self._form.opening, *self._form.skipping)
        held = reader.let_go()
        if marker in self._form.opening or (self._starts_inside and not marker):
            self._reasoning.append("" if marker else held)
            yield from reader.until(self._form.closing, self._reasoning.append)
        else:
            self._content.append("" if marker else held)
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
