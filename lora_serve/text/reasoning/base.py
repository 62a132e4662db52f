"""The seam between a model's way of writing its reasoning and all who answer with it. Pure text on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from lora_serve.text.pieces import PieceParser, Reading
from lora_serve.text.tool_calls.base import ContentText, in_regex, joined_grammars, marker

_SPACE = "/[ \\t\\r\\n]{0,8}/"  # what models write behind their reasoning; more of it would never have to end


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning; never empty."""

    text: str


ReasoningEvent: TypeAlias = ReasoningText | ContentText


class ReasoningFormat:
    """A way of writing reasoning: `file.py` of this package holds `class Format`, and the file's name names it.

    One of `opening` begins it, after white space at most, and the first of `closing` ends it.
    """

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[tuple[str, ...]]
    skipping: ClassVar[tuple[str, ...]] = ()  # markers that begin an answer without reasoning
    markers: ClassVar[tuple[str, ...]] = ()
    """Control tokens that the parser looks for: they must stay in the answer's text even if special tokens do not."""

    @classmethod
    def matches(cls, template: str) -> bool:
        """True if the chat template (its Jinja text) knows reasoning in this format.

        The closing marker is enough: templates that cut old reasoning out of messages look for no other.
        """
        return any(one in template for one in cls.closing)

    def is_open_after(self, prompt: str) -> bool:
        """True if the prompt's end has begun the reasoning already, so that the answer starts inside it."""
        return prompt.rstrip().endswith(tuple(one.rstrip() for one in self.opening))

    def parser(self, starts_inside: bool) -> ReasoningParser:
        """A new parser for one answer. `starts_inside`: the answer continues reasoning that the prompt has begun."""
        return ReasoningParser(self, starts_inside)

    def grammar(
        self, answer: str | None, calls: str | None, *, starts_inside: bool, token_ids: Mapping[str, int]
    ) -> str:
        """A grammar of what `answer` or `calls` allows, after reasoning, which is any text up to a marker. One at least
        of the two is given: what the content must be, and calls of tools.

        If the prompt has begun the reasoning, the opening marker may come again; else it may come, or the answer.
        `token_ids`: the ids of markers that are single tokens, which are then produced as these tokens.
        """

        def any_of(markers: tuple[str, ...]) -> str:
            return f"({' | '.join(marker(one, token_ids) for one in markers)})"

        before = f"{any_of(self.opening)}? thought" if starts_inside else f"({any_of(self.opening)} thought)?"
        if all(one in token_ids for one in self.closing):
            rules = [f"thought: TEXT {any_of(self.closing)} {_SPACE}", "TEXT: /(?s:.*)/"]
        else:
            ends = "|".join(map(in_regex, self.closing))
            rules = [f"thought: ended {_SPACE}", f"ended[lazy]: /(?s:.*)({ends})/"]
        texts = [text for text in (answer, calls) if text is not None]
        return joined_grammars(texts, [before] * len(texts), rules)


class ReasoningParser(PieceParser[ReasoningEvent]):
    """Parser that loses and changes nothing but the markers. What it calls content is fed to a parser of tool calls."""

    def __init__(self, form: ReasoningFormat, starts_inside: bool) -> None:
        super().__init__()
        self._form = form
        self._starts_inside = starts_inside

    def read(self) -> Reading[None]:
        """Read the whole answer. A marker that the prompt has written may be written again, and is dropped then."""
        reader = self.reader
        reader.hold()
        yield from reader.spaces()
        found = yield from reader.literal(*self._form.opening, *self._form.skipping)
        held = reader.let_go()
        if found in self._form.opening or (self._starts_inside and not found):
            self._reasoning("" if found else held)
            yield from reader.until(self._form.closing, self._reasoning)
        else:
            self._content("" if found else held)
        yield from reader.until((), self._content)

    def _reasoning(self, text: str) -> None:
        if text:
            self.add(ReasoningText(text))

    def _content(self, text: str) -> None:
        if text:
            self.add(ContentText(text))
