"""The seam between a model's way of writing tool calls and everybody who offers tools. Pure text on both sides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments, empty if none was given."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call whose name is known. `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments; never empty."""

    index: int
    text: str


ToolEvent: TypeAlias = ContentText | CallStarted | CallArguments


class ToolCallParser(ABC):
    """The reader of one answer. However its text is cut, the pieces given back join to the same events.

    Text that only begins like a call comes out as content. A call that breaks off is given as far as it came: its name
    and the arguments' text so far. No text raises an exception. The name need not be one of the tools'.
    """

    @abstractmethod
    def feed(self, text: str) -> list[ToolEvent]:
        """The events that `text`, the next piece of the answer, makes certain."""

    @abstractmethod
    def finish(self) -> list[ToolEvent]:
        """The events of the text that was held back; the answer has ended. Nothing is fed afterwards."""


class ToolCallFormat(ABC):
    """A way of writing tool calls: `file.py` of this package holds `class Format`, and the file's name names it."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Control tokens that the parser looks for: they must stay in the answer's text even if special tokens do not."""

    @classmethod
    @abstractmethod
    def matches(cls, template: str) -> bool:
        """True if the chat template (its Jinja text) writes calls in this format."""

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        """A new parser for one answer (one per choice)."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        """Lark text of `llguidance`: one call of one of `tools`, or one or more if `parallel`, and nothing else.

        `token_ids`: the ids of those `markers` that are single tokens of the request's tokenizer, special or merely
        added, which are then produced as these tokens; other markers are produced as text, by whatever tokens spell it.
        Arguments obey the tools' schemas. To force one tool, give that tool alone.
        Raises InvalidRequestError if the format cannot write arguments of such a schema.
        """
