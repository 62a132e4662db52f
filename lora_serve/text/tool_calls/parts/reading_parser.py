"""A parser of tool calls whose format is one generator over the answer's text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby

from lora_serve.text.pieces import Reader, Reading
from lora_serve.text.tool_calls.base import CallArguments, CallStarted, ContentText, Tool, ToolCallParser, ToolEvent


class ReadingParser(ToolCallParser):
    """Parser whose `read` takes text from `reader` and says what it is by `content`, `start` and `arguments`.

    White space at the answer's beginning and after a call is dropped if nothing but calls or the end follows it. So is
    text after a call that is still held back at the end: the beginning of a call of which nothing is known.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.reader = Reader()
        self.known_names = frozenset(tool.name for tool in tools)
        self._events: list[ToolEvent] = []
        self._num_calls = 0
        self._is_at_edge = True
        self._blank: list[str] = []
        self._reading = self.read()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the whole answer, to its end."""

    def feed(self, text: str) -> list[ToolEvent]:
        self.reader.append(text)
        return self._advanced()

    def finish(self) -> list[ToolEvent]:
        self.reader.end()
        events = self._advanced()
        if self._blank and not self._num_calls:
            events.append(ContentText("".join(self._blank)))
        return events

    def content(self, text: str) -> None:
        """The next text of the answer is content."""
        if not text or (self._is_at_edge and self._num_calls and self.reader.is_ended):
            return
        if self._is_at_edge and text.isspace():
            self._blank.append(text)
            return
        self._events.extend(ContentText(piece) for piece in (*self._blank, text))
        self._blank.clear()
        self._is_at_edge = False

    def start(self, name: str) -> None:
        """A call begins; what `reader` holds belongs to it."""
        self.reader.let_go()
        self._events.append(CallStarted(self._num_calls, name))
        self._num_calls += 1
        self._blank.clear()
        self._is_at_edge = True

    def arguments(self, text: str) -> None:
        """The next text of the arguments of the call that was started last."""
        if text:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def release(self) -> None:
        """Give what `reader` holds as content."""
        self.content(self.reader.let_go())

    def rest_is_content(self) -> Reading[None]:
        """Read the rest of the answer, of which nothing is a call."""
        self.release()
        yield from self.reader.until((), self.content)

    def _advanced(self) -> list[ToolEvent]:
        next(self._reading, None)
        events, self._events = self._events, []
        return _joined(events)


def _joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """The events, neighbouring pieces of one text as one."""
    joined: list[ToolEvent] = []
    for _, group in groupby(events, _text_of):
        first, *others = group
        texts = [event.text for event in (first, *others) if not isinstance(event, CallStarted)]
        if isinstance(first, ContentText):
            joined.append(ContentText("".join(texts)))
        elif isinstance(first, CallArguments):
            joined.append(CallArguments(first.index, "".join(texts)))
        else:
            joined.append(first)
    return joined


def _text_of(event: ToolEvent) -> tuple[type[ToolEvent], int]:
    return type(event), -1 if isinstance(event, ContentText) else event.index
