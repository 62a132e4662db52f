"""The seam between a model's way of writing its reasoning and all who answer with it. Pure text on both sides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

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
