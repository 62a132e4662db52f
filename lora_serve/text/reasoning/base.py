"""The seam between a model's way of writing its reasoning and all who answer with it. Pure text on both sides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from lora_serve.text.pieces import Reader, Reading
from lora_serve.text.tool_calls.base import ContentText


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning; never empty."""

    text: str


ReasoningEvent: TypeAlias = ReasoningText | ContentText


class ReasoningParser(ABC):
    """The reader of one answer. However its text is cut, the pieces given back join to the same texts.

    Nothing is lost or changed but the markers. What it calls content is what a parser of tool calls is fed with.
    """

    @abstractmethod
    def feed(self, text: str) -> list[ReasoningEvent]:
        """The events that `text`, the next piece of the answer, makes certain."""

    @abstractmethod
    def finish(self) -> list[ReasoningEvent]:
        """The events of the text that was held back; the answer has ended. Nothing is fed afterwards."""


class ReasoningFormat(ABC):
    """A way of writing reasoning: `file.py` of this package holds `class Format`, and the file's name names it."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Control tokens that the parser looks for: they must stay in the answer's text even if special tokens do not."""

    @classmethod
    @abstractmethod
    def matches(cls, template: str) -> bool:
        """True if the chat template (its Jinja text) knows reasoning in this format."""

    @abstractmethod
    def is_open_after(self, prompt: str) -> bool:
        """True if the prompt's end has begun the reasoning already, so that the answer starts inside it."""

    @abstractmethod
    def parser(self, starts_inside: bool) -> ReasoningParser:
        """A new parser for one answer. `starts_inside`: the answer continues reasoning that the prompt has begun."""


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
