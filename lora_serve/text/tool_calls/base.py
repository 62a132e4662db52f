"""The seam between a model's way of writing tool calls and everybody who offers tools. Pure text on both sides.
Parsers run on the event loop.

Formats share the parser, and the functions that put grammars together: `llguidance` reads them as Lark text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, TypeAlias

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.pieces import PieceParser, Reading, nowhere


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


class CallEnd(Enum):
    """The end of reading something that may be a call."""

    COMPLETE = auto()
    BROKEN = auto()  # a call was started, and does not go on as one
    NO_CALL = auto()  # nothing was started, as the text is something else; the reader holds it
    CUT = auto()  # nothing was started; the text ended in the middle of the call, and the reader holds it


class ToolCallFormat(ABC):
    """A way of writing tool calls: `file.py` of this package holds `class Format`, and the file's name names it."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Control tokens that the parser looks for: they must stay in the answer's text even if special tokens do not."""

    @classmethod
    @abstractmethod
    def matches(cls, template: str) -> bool:
        """True if the chat template (its Jinja text) writes calls in this format."""

    @abstractmethod
    def read(self, answer: ToolCallParser) -> Reading[None]:
        """Read the whole answer: take text from `answer.reader`, say what it is by `content`, `start`, `arguments`."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        """Lark text of `llguidance`: one call of one of `tools`, or one or more if `parallel`, and nothing else.

        `token_ids`: the ids of those `markers` that are single tokens of the request's tokenizer, special or merely
        added, which are then produced as these tokens; other markers are produced as text, by whatever tokens spell it.
        Arguments obey the tools' schemas. To force one tool, give that tool alone.
        Raises InvalidRequestError if the format cannot write arguments of such a schema.
        """

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        """A new parser for one answer (one per choice)."""
        return ToolCallParser(self, tools)


class ToolCallParser(PieceParser[ToolEvent]):
    """The reader of one answer, as its format reads it.

    Text that only begins like a call comes out as content. A call that breaks off is given as far as it came: its name
    and the arguments' text so far. No text raises an exception. The name need not be one of the tools'.

    White space at the answer's beginning and after a call is dropped if nothing but calls or the end follows it. So is
    text after a call that is still held back at the end: the beginning of a call of which nothing is known.
    """

    def __init__(self, form: ToolCallFormat, tools: Sequence[Tool]) -> None:
        self._form = form
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._num_calls = 0
        self._is_at_edge = True
        self._blank: list[str] = []
        super().__init__()

    def read(self) -> Reading[None]:
        return self._form.read(self)

    def finish(self) -> list[ToolEvent]:
        events = super().finish()
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
        self.add(ContentText("".join((*self._blank, text))))
        self._blank.clear()
        self._is_at_edge = False

    def start(self, name: str) -> None:
        """A call begins; what `reader` holds belongs to it."""
        self.reader.let_go()
        self.add(CallStarted(self._num_calls, name))
        self._num_calls += 1
        self._blank.clear()
        self._is_at_edge = True

    def arguments(self, text: str) -> None:
        """The next text of the arguments of the call that was started last."""
        if text:
            self.add(CallArguments(self._num_calls - 1, text))

    def release(self) -> None:
        """Give what `reader` holds as content."""
        self.content(self.reader.let_go())

    def rest_is_content(self) -> Reading[None]:
        """Read the rest of the answer, of which nothing is a call."""
        self.release()
        yield from self.reader.until((), self.content)

    def marked_calls(
        self,
        begins: tuple[str, ...],
        call: Callable[[str], Reading[CallEnd]],
        next_begin: Callable[[], Reading[str]],
        first: str = "",
    ) -> Reading[None]:
        """Read the answer, in which one of `begins` stands before each call; `first`, if it has been read already.

        `call` reads a call, from behind its marker on; `next_begin` what follows it, past the next call's marker.
        """
        found = first or (yield from self.reader.until(begins, self.content))
        while found:
            self.reader.hold(found)
            end = yield from call(found)
            if end is CallEnd.CUT:
                return
            if end is CallEnd.NO_CALL:
                self.release()
                found = yield from self.reader.until(begins, self.content)
            else:
                found = yield from next_begin()

    def next_begin(self, begin: str, end: str) -> Reading[str]:
        """Read what follows a call, to the marker that ends it, then content, past the one that begins the next."""
        found = yield from self.reader.until((end, begin), nowhere)
        return (yield from self.reader.until((begin,), self.content)) if found == end else found

    def call_list(self, call: Callable[[], Reading[CallEnd]]) -> Reading[CallEnd]:
        """Read calls separated by commas, to the bracket that closes the list; the one that opens it has been read.

        What the reader holds at the end is content, but for `COMPLETE`: then it holds nothing.
        """
        reader = self.reader
        while True:
            yield from reader.spaces()
            end = yield from call()
            if end is not CallEnd.COMPLETE:
                return end
            reader.hold()
            yield from reader.spaces()
            separator = yield from reader.literal(",", "]")
            if separator == "]":
                reader.let_go()
                return CallEnd.COMPLETE
            if separator == "":
                return CallEnd.BROKEN


# As Python's json.dumps writes it, which is what models are trained on. Free white space would let a model go on for
# ever with nothing else, and no token would be forced.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")


def quoted(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, token_ids: Mapping[str, int]) -> str:
    """A marker as its token if it is a single one, else as text."""
    return f"<[{token_ids[text]}]>" if text in token_ids else quoted(text)


def in_regex(text: str) -> str:
    """A text as a regular expression that may stand between slashes."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def value_of(schema: Mapping[str, Any]) -> str:
    """A JSON value that obeys a schema, spaced as Python's json.dumps does."""
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING})


def arguments_of(tool: Tool) -> str:
    """The JSON object of a tool's arguments: those that the schema names, unless it speaks of others."""
    schema = {**tool.parameters, "type": "object"}
    named, required = schema.get("properties") or {}, schema.get("required") or []
    is_plain = isinstance(named, dict) and isinstance(required, list)  # else the compiler says what is wrong
    if is_plain and named and all(name in named for name in required) and not any(word in schema for word in _OPEN):
        schema["additionalProperties"] = False
    return value_of(schema)


def alternatives(rule: str, bodies: Sequence[str]) -> list[str]:
    """Rule `rule`: any of `bodies`, each a rule of its own, `rule_0` and so on."""
    names = [f"{rule}_{number}" for number in range(len(bodies))]
    return [f"{rule}: {' | '.join(names)}", *(f"{name}: {body}" for name, body in zip(names, bodies, strict=True))]


def repeated(rule: str, separator: str, parallel: bool) -> str:
    """The rule once, or as often as the model likes if `parallel`."""
    return f"{rule} ({separator} {rule})*" if parallel else rule


def listed(rule: str, parallel: bool) -> str:
    """The rule in brackets, with others after commas if `parallel`."""
    return f"{quoted('[')} {repeated(rule, quoted(', '), parallel)} {quoted(']')}"


def call_rules(tools: Sequence[Tool], written: Callable[[Tool, str], str]) -> list[str]:
    """Rule `call`: any of the tools. `written` puts a tool's call together from the tool and its arguments' rule."""
    calls = alternatives("call", [written(tool, f"arguments_{number}") for number, tool in enumerate(tools)])
    return [*calls, *(f"arguments_{number}: {arguments_of(tool)}" for number, tool in enumerate(tools))]


def named_object(tool: Tool, arguments: str, *, key: str = "arguments") -> str:
    """A call as a JSON object with name and arguments."""
    begin = '{"name": ' + json.dumps(tool.name, ensure_ascii=False) + f', "{key}": '
    return f"{quoted(begin)} {arguments} {quoted('}')}"


def lark(start: str, rules: Sequence[str]) -> str:
    return "\n".join(("%llguidance {}", f"start: {start}", *rules)) + "\n"


MAX_MEMBERS = 1000  # the compiler follows their rules by recursion: a stack of 8 MB overflows at some 2500
_JOINING = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired"),
    *("dependentSchemas", "maxProperties", "minProperties", "patternProperties", "propertyNames"),
    "unevaluatedProperties",
)  # keywords with which one member depends on another


def members_of(schema: Mapping[str, Any], place: str) -> dict[str, tuple[Any, bool]]:
    """The schema of each property of an object, and whether it is required.

    Raises InvalidRequestError if the object's members cannot be told one by one. `place` names it.
    """
    joining = [word for word in _JOINING if word in schema]
    if joining:
        raise InvalidRequestError(
            f"{place}: this model's tool-call format cannot force an object with {', '.join(joining)}; list its "
            "properties, or use tool_choice auto",
            param="tools",
        )
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    needed = frozenset(map(str, required))
    members = {str(name): (member, str(name) in needed) for name, member in properties.items()}
    members |= {str(name): ({}, True) for name in required if name not in properties}
    if len(members) > MAX_MEMBERS:
        message = f"{place}: this model's tool-call format cannot force more than {MAX_MEMBERS} members"
        raise InvalidRequestError(f"{message}; use tool_choice auto", param="tools")
    return members


def sequence(rule: str, pairs: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Rule `rule`: `pairs` (a rule and whether it must come) in their order, with commas between them."""
    rules, begun, first_of = [], [], []
    for number, (pair, is_required) in enumerate(pairs):
        tail = f"{rule}_after_{number + 1}" if number + 1 < len(pairs) else ""
        joined = f"{comma} {pair}"
        begun.append(f"{rule}_after_{number}: {joined if is_required else f'({joined})?'} {tail}")
        if all(not earlier for _, earlier in pairs[:number]):
            first_of.append(f"{pair} {tail}")
    if not any(is_required for _, is_required in pairs):
        first_of.append('""')
    rules.append(f"{rule}: {' | '.join(first_of)}")
    return rules + begun[1:]


def joined_grammars(texts: Sequence[str], heads: Sequence[str] = (), rules: Sequence[str] = ()) -> str:
    """A grammar of what one of `texts` allows. `heads`: what stands before each, in terms of `rules`."""
    if not heads and len(texts) == 1:
        return texts[0]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        grammars = json.loads(text)["grammars"] if text.lstrip().startswith("{") else [{"lark_grammar": text}]
        grammars[0]["name"] = f"answer_{number}"
        parts += grammars
    before = heads or [""] * len(texts)
    answer = " | ".join(f"{head} @answer_{number}" for number, head in enumerate(before))
    first = "\n".join((f"start: {answer}", *rules)) + "\n"
    return json.dumps({"grammars": [{"lark_grammar": first}, *parts]}, ensure_ascii=False)
