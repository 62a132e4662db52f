"""GPT-OSS: reasoning is the messages of harmony's `analysis` channel, content those of `final` and `commentary`.

A message to a tool is passed on as it is, for the parser of calls (`tool_calls/openai.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.text.harmony import (
    AUTHOR,
    CALL,
    CHANNEL,
    END,
    MARKERS,
    MESSAGE,
    RECIPIENT,
    START,
    Header,
    could_be_cut,
    read_header,
)
from lora_serve.text.pieces import Reading, Sink
from lora_serve.text.reasoning.base import ReasoningFormat, ReasoningParser
from lora_serve.text.tool_calls.base import in_regex, joined_grammars, marker, quoted

_ANALYSIS = "analysis"


class Format(ReasoningFormat):
    opening = (f"{CHANNEL}{_ANALYSIS}{MESSAGE}",)
    closing = (f"{END}{START}{AUTHOR}{CHANNEL}final{MESSAGE}",)
    markers = MARKERS

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.opening[0] in template

    def parser(self, starts_inside: bool) -> ReasoningParser:
        return _Parser(self, starts_inside)

    def grammar(
        self, answer: str | None, calls: str | None, *, starts_inside: bool, token_ids: Mapping[str, int]
    ) -> str:
        """Allow any number of messages of reasoning; then calls, which have headers of their own, or the answer in the
        `final` channel, whose header may be missing as the prompt may have written it.
        """

        def written(*parts: str) -> str:
            return " ".join(marker(part, token_ids) if part in MARKERS else quoted(part) for part in parts)

        opened, final = written(CHANNEL, _ANALYSIS, MESSAGE), written(CHANNEL, "final", MESSAGE)
        if END in token_ids:
            rules = [f"thought: TEXT {written(END, START, AUTHOR)}", "TEXT: /(?s:.*)/"]
        else:
            rules = [f"thought: ended {written(START, AUTHOR)}", f"ended[lazy]: /(?s:.*){in_regex(END)}/"]
        thoughts = f"({opened})? thought ({opened} thought)*" if starts_inside else f"({opened} thought)*"
        heads = (f"{thoughts} {final}" if starts_inside else f"({thoughts} {final})?", thoughts)
        pairs = [(text, head) for text, head in zip((answer, calls), heads, strict=True) if text is not None]
        return joined_grammars([text for text, _ in pairs], [head for _, head in pairs], rules)


class _Parser(ReasoningParser):
    """The reader of an answer's messages. Those of one kind are joined by a line break, as vLLM does.

    A header that the answer's end cuts is dropped. What stands where a header should is text of the message before.
    """

    def __init__(self, form: ReasoningFormat, starts_inside: bool) -> None:
        super().__init__(form, starts_inside)
        self._begun = set[Sink]()

    def read(self) -> Reading[None]:
        reader = self.reader
        sink = self._next_of(self._reasoning) if self._starts_inside else self._content
        reader.hold()
        yield from reader.spaces()
        begin = yield from reader.literal(START, CHANNEL, RECIPIENT)
        if not (begin or self._starts_inside):
            sink(reader.let_go())
            yield from reader.until((), sink)
            return
        ended = ""
        while True:
            header = (yield from read_header(reader, begin)) if begin else ""
            held = reader.let_go()
            if isinstance(header, str):
                is_cut = (could_be_cut(header) if begin else ended) and (yield from reader.peek()) == ""
                sink("" if is_cut else held)
            elif header.recipient:
                sink = self._content
                sink(held.removeprefix(ended))
            else:
                sink = self._next_of(self._reasoning if header.channel == _ANALYSIS else self._content)
            ended = yield from reader.until((END, CALL), sink)
            if not ended:
                return
            if isinstance(header, Header) and header.recipient:
                sink(ended)
                ended = ""
            reader.hold(ended)
            yield from reader.spaces()
            begin = yield from reader.literal(START)

    def _next_of(self, kind: Sink) -> Sink:
        """The sink of one more message of a kind."""
        waiting = "\n" if kind in self._begun else ""

        def put(text: str) -> None:
            nonlocal waiting
            kind(waiting + text)
            waiting = ""
            self._begun.add(kind)

        return put
