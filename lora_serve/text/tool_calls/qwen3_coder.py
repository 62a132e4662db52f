"""Qwen3-Coder and Qwen 3.5, Nemotron 3: `<tool_call>`, `<function=name>`, `<parameter=key>`, each value as bare text.

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen/Qwen3.5-35B-A3B.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.pieces import MAX_SHORT, NAME, Reading, inner_json, nowhere
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    alternatives,
    in_regex,
    lark,
    marker,
    members_of,
    quoted,
    repeated,
    value_of,
)
from lora_serve.text.typed_text import KINDS, TypedText, kind_of, kinds_of, literal_text, referred, value_in

_KEY = re.compile(r'[^<>"\n]+')
_UNTOLD = ("allOf", "not", "if", "pattern")
_BARE = {"type", "title", "description", "default", "examples", "minLength", "maxLength"}  # limit texts at most


class Format(ToolCallFormat):
    """Calls between markers, each a tag with the name, then pairs of a key and the text of its value.

    A value is of the type that the tool's schema gives it (`typed_text`). The tag that ends it is text if what follows
    is neither another key nor the call's end.
    """

    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    call_tags: ClassVar[tuple[str, str, str]] = ("<function=", ">", "</function>")  # before and after the name; the end
    key_tags: ClassVar[tuple[str, ...]] = ("<parameter=", ">")  # before the key; after it, with space between
    value_end: ClassVar[str] = "</parameter>"
    line: ClassVar[str] = "\n"  # stands before and after a value
    gap: ClassVar[str] = quoted("\n")  # what a grammar has between tags
    has_bare_calls: ClassVar[bool] = True  # models forget the marker before a call
    holds_all: ClassVar[bool] = False  # one pair of markers holds all calls
    markers = (begin, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.begin in template and cls.call_tags[0] in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        rules = _Rules(self, token_ids)
        calls = alternatives("call", [rules.call(tool) for tool in tools])
        around = self.gap if self.call_tags[0] else ""
        inside = repeated("call", self.gap, parallel and self.holds_all)
        block = f"block: {marker(self.begin, token_ids)} {around} {inside} {around} {marker(self.end, token_ids)}"
        return lark(repeated("block", self.gap, parallel and not self.holds_all), [block, *calls, *rules.rules])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        calls = _Calls(self, answer)
        begins = (self.begin, self.call_tags[0]) if self.has_bare_calls and self.call_tags[0] else (self.begin,)
        return answer.marked_calls(begins, calls.read, lambda: calls.next_begin(begins))


class _Calls:
    """The reader of an answer's calls, one after another."""

    def __init__(self, form: Format, answer: ToolCallParser) -> None:
        self._form = form
        self._answer = answer
        self._reader = answer.reader
        self._is_inside = False  # the markers of a block
        self._waiting = ""  # JSON that goes before the next value
        self._kinds: dict[tuple[str, str], frozenset[str]] = {}

    def read(self, begin: str) -> Reading[CallEnd]:
        """Read a call from behind the marker or tag that begins it."""
        form, reader = self._form, self._reader
        opening, name_end, _ = form.call_tags
        is_call = True
        if begin == form.begin:
            self._is_inside = True
            yield from reader.spaces()
            is_call = not opening or (yield from reader.literal(opening)) != ""
        name = (yield from reader.word(NAME, MAX_SHORT)) if is_call else ""
        tag = (yield from reader.literal(name_end)) if name_end and name else ""
        found = "" if name_end or not name else (yield from self._next_tag())
        if not (tag or found) or not (self._is_inside or name in self._answer.tools):
            is_cut = reader.is_ended and self._is_inside
            self._is_inside = False
            return CallEnd.CUT if is_cut else CallEnd.NO_CALL
        self._answer.start(name)
        self._waiting = "{"
        if tag:
            found = yield from self._next_tag()
        while found == form.key_tags[0]:
            found = yield from self._argument(name)
        if not found:
            return CallEnd.BROKEN
        self._answer.arguments("{}" if self._waiting == "{" else "}")
        if found == form.end:
            self._is_inside = False
        elif not self._is_inside:
            yield from self._skip_end()
        return CallEnd.COMPLETE

    def next_begin(self, begins: tuple[str, ...]) -> Reading[str]:
        """Read what follows a call, past the marker or tag that begins the next."""
        if self._is_inside:
            inner = self._form.call_tags[:1] if self._form.call_tags[0] else ()
            found = yield from self._reader.until((self._form.end, self._form.begin, *inner), nowhere)
            if found != self._form.end:
                return found
            self._is_inside = False
        return (yield from self._reader.until(begins, self._answer.content))

    def _next_tag(self) -> Reading[str]:
        """Read the tag that begins the next pair or ends the call; empty if none does."""
        form = self._form
        yield from self._reader.spaces()
        ends = (form.call_tags[2], form.end) if form.call_tags[2] else (form.end,)
        return (yield from self._reader.literal(form.key_tags[0], *ends))

    def _argument(self, name: str) -> Reading[str]:
        """Read a key, its value and the tag behind it, which is returned; empty if it breaks off."""
        form, reader = self._form, self._reader
        key = yield from reader.word(_KEY, MAX_SHORT)
        for tag in form.key_tags[1:]:
            yield from reader.spaces()
            if not key or (yield from reader.literal(tag)) == "":
                return ""
        if form.line:
            yield from reader.literal(form.line)
        self._waiting += f'"{inner_json(key.strip())}": '
        value = TypedText(self._kinds_of(name, key.strip()), self._pass_on)
        while True:
            # What is left when the text has ended is the beginning of a tag that was cut.
            found = yield from reader.until(
                (form.line + form.value_end, form.value_end), lambda piece: reader.is_ended or value.put(piece)
            )
            if not found:
                return ""
            reader.hold(found)
            following = yield from self._next_tag()
            held = reader.let_go()
            if following or reader.is_ended:
                value.end()
                self._waiting = ", "
                return following
            value.put(held)

    def _pass_on(self, text: str) -> None:
        self._answer.arguments(self._waiting + text)
        self._waiting = ""

    def _kinds_of(self, name: str, key: str) -> frozenset[str]:
        if (name, key) not in self._kinds:
            tool = self._answer.tools.get(name, Tool(name))
            properties = tool.parameters.get("properties")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            self._kinds[name, key] = kinds_of(schema, tool.parameters)
        return self._kinds[name, key]

    def _skip_end(self) -> Reading[None]:
        """Read the marker behind a call that began without one, if it is there."""
        self._reader.hold()
        yield from self._reader.spaces()
        if (yield from self._reader.literal(self._form.end)) != "":
            self._reader.let_go()
        self._answer.release()


class _Rules:
    """The rules of calls and values, collected in `rules` as they are asked for."""

    def __init__(self, form: Format, token_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._form = form
        self._token_ids = token_ids
        self._tool = Tool("")

    def call(self, tool: Tool) -> str:
        """The call of a tool, as a rule's body."""
        self._tool = tool
        opening, name_end, close = self._form.call_tags
        members = members_of(tool.parameters, f"Parameters of tool {tool.name!r}")
        pairs = [
            self._pair(name, schema) if is_required else f"({self._pair(name, schema)})?"
            for name, (schema, is_required) in members.items()
        ]
        head = quoted(f"{opening}{tool.name}{name_end}")
        return " ".join((head, self._form.gap, *pairs, quoted(close) if close else ""))

    def _pair(self, name: str, schema: Any) -> str:
        """The rule of a key and its value."""
        if not _KEY.fullmatch(name) or name != name.strip():
            message = f"Tool {self._tool.name!r}: {name!r} cannot be the name of a parameter"
            raise InvalidRequestError(message, param="tools")
        first, key_end, *others = (marker(tag, self._token_ids) for tag in self._form.key_tags)
        tags = " ".join(f"{self._form.gap} {tag}" for tag in others)
        line = quoted(self._form.line) if self._form.line else ""
        return self._rule(f"{first} {quoted(name)} {key_end} {tags} {line} ({self._value(schema)}) {self._form.gap}")

    def _rule(self, body: str) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        """What stands for a value that obeys `schema` and the tag that ends it."""
        kinds = kinds_of(schema, self._tool.parameters)
        if "string" not in kinds or kinds == KINDS:
            return self._json(schema)
        options = self._options(schema)
        texts = [option for option in options if option.get("type") == "string"]
        if texts and any(_limits(option) for option in options if option not in texts):
            raise self._refused("a value that may be any text, or one of another kind with limits")
        return " | ".join(self._option(option, kinds) for option in options)

    def _option(self, option: Mapping[str, Any], kinds: frozenset[str]) -> str:
        if "const" in option:
            return self._literal(option["const"], kinds)
        return self._text(option) if option["type"] == "string" else self._json(option)

    def _options(self, schema: Any) -> list[Mapping[str, Any]]:
        """The schemas that a value may obey, each of one value (`const`) or one `type`."""
        waiting, followed, found = [schema], set[str](), list[Mapping[str, Any]]()
        while waiting:
            one = waiting.pop(0)
            if not isinstance(one, Mapping) or any(word in one for word in _UNTOLD):
                raise self._refused(f"a text with {' or '.join(_UNTOLD)}")
            options, types = one.get("anyOf") or one.get("oneOf"), one.get("type")
            if "$ref" in one:
                if (reference := str(one["$ref"])) not in followed:
                    waiting.append(referred(reference, self._tool.parameters))
                followed.add(reference)
            elif options:
                if types:
                    raise self._refused("a text with both type and anyOf")
                waiting += options
            elif "const" in one or "enum" in one:
                found += [{"const": value} for value in (one["enum"] if "enum" in one else [one["const"]])]
            else:
                found += [{**one, "type": kind} for kind in ([types] if isinstance(types, str) else types or ())]
        return found

    def _literal(self, value: Any, kinds: frozenset[str]) -> str:
        text = literal_text(value)
        if isinstance(value, str) and (self._form.value_end in text or value_in(text, kinds)):
            raise self._refused(f"the text {text[:64]!r}")
        return f"{quoted(text)} {self._end}" if text else self._end

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Any text but the tag that ends it, which is found by a lazy rule if it is no token of its own."""
        least, longest = int(schema.get("minLength", 0)), schema.get("maxLength")
        text = f"(?s:.{{{least},{'' if longest is None else int(longest)}}})"
        end, name = in_regex(self._form.value_end), f"TEXT_{len(self.rules)}"
        if self._form.value_end in self._token_ids:
            self.rules.append(f"{name}: /{text}/ & ~/(?s:.*{end}.*)/")
            return f"{name} {self._end}"
        line = in_regex(self._form.line)
        self.rules.append(f"{name}: /{text}{line}{end}/ & ~/(?s:.*{end}.+)/")
        self.rules.append(f"part_{len(self.rules)}[lazy]: {name}")
        return f"part_{len(self.rules) - 1}"

    def _json(self, schema: Any) -> str:
        around = {key: self._tool.parameters[key] for key in ("$defs", "definitions") if key in self._tool.parameters}
        whole = {**schema, **around} if isinstance(schema, Mapping) else {}
        return f"{self._rule(value_of(whole))} {self._end}"

    @property
    def _end(self) -> str:
        line = quoted(self._form.line) if self._form.line else ""
        return f"{line} {marker(self._form.value_end, self._token_ids)}"

    def _refused(self, what: str) -> InvalidRequestError:
        message = f"Parameters of tool {self._tool.name!r}: this model's tool-call format cannot force {what}"
        return InvalidRequestError(f"{message}; leave it out, or use tool_choice auto", param="tools")


def _limits(option: Mapping[str, Any]) -> bool:
    """True if the option allows some values of its kind, and not all."""
    if "const" in option:
        return option["const"] is not None
    return kind_of(None) != option["type"] and not option.keys() <= _BARE
