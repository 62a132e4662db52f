"""Qwen3-Coder and Qwen 3.5, Nemotron 3: `<tool_call>`, `<function=name>`, `<parameter=key>`, each value as bare text.

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen/Qwen3.5-35B-A3B.
"""

from __future__ import annotations

import json
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
from lora_serve.text.tool_calls.gemma4 import Rules
from lora_serve.text.typed_text import KINDS, TypedText, kinds_of, typed

_KEY = re.compile(r'[^<>"\n]+')
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
    holds_all: ClassVar[bool] = False  # one pair of markers holds all calls
    markers: ClassVar[tuple[str, ...]] = (begin, end)

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
        return answer.marked_calls(calls.begins, calls.read, calls.next_begin)


class _Calls:
    """The reader of an answer's calls. Models forget the markers around them: those of known tools need none."""

    def __init__(self, form: Format, answer: ToolCallParser) -> None:
        self.begins = tuple(filter(None, (form.begin, form.call_tags[0])))
        self._form = form
        self._answer = answer
        self._reader = answer.reader
        self._is_inside = False  # the markers of a block
        self._waiting = ""  # JSON that goes before the next value

    def read(self, begin: str) -> Reading[CallEnd]:
        """Read a call from behind the marker or tag that begins it. It is one if it has an argument, or ends."""
        form, reader = self._form, self._reader
        opening, name_end, _ = form.call_tags
        is_named = True
        if begin == form.begin:
            self._is_inside = True
            yield from reader.spaces()
            is_named = not opening or (yield from reader.literal(opening)) != ""
        name = (yield from reader.word(NAME, MAX_SHORT)) if is_named else ""
        is_named = name != "" and (not name_end or (yield from reader.literal(name_end)) != "")
        found = (yield from self._next_tag()) if is_named else ""
        if not found or not (self._is_inside or name in self._answer.tools):
            is_cut = reader.is_ended and self._is_inside
            self._is_inside = False
            return CallEnd.CUT if is_cut else CallEnd.NO_CALL
        self._answer.start(name)
        self._waiting = "{"
        while found == form.key_tags[0]:
            found = yield from self._argument(name)
        if not found:
            return CallEnd.BROKEN
        self._answer.arguments("{}" if self._waiting == "{" else "}")
        self._is_inside &= found != form.end
        return CallEnd.COMPLETE

    def next_begin(self) -> Reading[str]:
        """Read what follows a call, past the marker or tag that begins the next."""
        sink = nowhere if self._is_inside else self._answer.content
        found = yield from self._reader.until((self._form.end, *self.begins), sink)
        if found != self._form.end:
            return found
        self._is_inside = False
        return (yield from self._reader.until(self.begins, self._answer.content))

    def _next_tag(self) -> Reading[str]:
        """Read the tag that begins the next pair or ends the call; empty if none does."""
        yield from self._reader.spaces()
        tags = (self._form.key_tags[0], self._form.call_tags[2], self._form.end)
        return (yield from self._reader.literal(*filter(None, tags)))

    def _argument(self, name: str) -> Reading[str]:
        """Read a key, its value and the tag behind it, which is returned; empty if it breaks off."""
        form, reader = self._form, self._reader
        key = yield from reader.word(_KEY, MAX_SHORT)
        for tag in form.key_tags[1:]:
            yield from reader.spaces()
            if not key or (yield from reader.literal(tag)) == "":
                return ""
        yield from reader.literal(form.line)
        self._waiting += f'"{inner_json(key.strip())}": '
        value = TypedText(self._kinds_of(name, key.strip()), self._pass_on)

        def put(piece: str) -> None:
            if not reader.is_ended:  # else it is the beginning of a tag that was cut
                value.put(piece)

        while found := (yield from reader.until((form.line + form.value_end, form.value_end), put)):
            reader.hold(found)
            following = yield from self._next_tag()
            held = reader.let_go()
            if following or reader.is_ended:
                value.end()
                self._waiting = ", "
                return following
            value.put(held)
        return ""

    def _pass_on(self, text: str) -> None:
        self._answer.arguments(self._waiting + text)
        self._waiting = ""

    def _kinds_of(self, name: str, key: str) -> frozenset[str]:
        parameters = self._answer.tools.get(name, Tool(name)).parameters
        properties = parameters.get("properties")
        return kinds_of(properties.get(key) if isinstance(properties, Mapping) else None, parameters)


class _Rules(Rules):
    """The rules of calls; that of a value includes the tag that ends it."""

    def __init__(self, form: Format, token_ids: Mapping[str, int]) -> None:
        super().__init__(form.value_end, marker(form.value_end, token_ids))
        self._form = form
        self._token_ids = token_ids
        self._line = quoted(form.line) if form.line else ""
        self._kinds = KINDS  # of the value
        self._has_text = self._has_limits = False  # it may be any text; or of another kind, but not any of that

    def _call(self, tool: Tool) -> str:
        opening, name_end, close = self._form.call_tags
        members = members_of(tool.parameters, f"Parameters of tool {tool.name!r}").items()
        pairs = [self._pair(name, schema) + ("" if is_required else "?") for name, (schema, is_required) in members]
        head = f"{quoted(opening + tool.name + name_end)} {self._form.gap}"
        return f"{head} {' '.join(pairs)} {quoted(close) if close else ''}"

    def _pair(self, name: str, schema: Any) -> str:
        """The rule of a key and its value."""
        if not _KEY.fullmatch(name) or name != name.strip():
            message = f"Tool {self._tool.name!r}: {name!r} cannot be the name of a parameter"
            raise InvalidRequestError(message, param="tools")
        self._kinds, self._of_refs = kinds_of(schema, self._tool.parameters), {}
        self._has_text = self._has_limits = False
        value = self._value(schema)
        if self._has_text and self._has_limits:
            raise self._refused("a value that may be any text, or one of another kind with limits")
        first, key_end, *others = (marker(tag, self._token_ids) for tag in self._form.key_tags)
        tags = " ".join((first, quoted(name), key_end, *(f"{self._form.gap} {tag}" for tag in others)))
        return self._rule(f"{tags} {self._line} {value} {self._form.gap}")

    def _value(self, schema: Any) -> str:
        kinds = kinds_of(schema, self._tool.parameters)
        if "string" not in kinds or kinds == KINDS:
            return self._json(schema)
        if "type" in schema and ("anyOf" in schema or "oneOf" in schema):
            raise self._refused("a text with both type and anyOf or oneOf")
        return super()._value(schema)

    def _of_kind(self, schema: Mapping[str, Any], kind: str) -> str:
        return self._text(schema) if kind == "string" else self._json(schema)

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Any text but the tag that ends it, and the tag, which a lazy rule finds if it is no token of its own."""
        self._has_text = True
        least, longest = int(schema.get("minLength", 0)), schema.get("maxLength")
        text = f"(?s:.{{{least},{'' if longest is None else int(longest)}}})"
        end, name = in_regex(self._quote), self._new_name()
        if self._quote in self._token_ids:
            self.rules.append(f"{name.upper()}: /{text}/ & ~/(?s:.*{end}.*)/")
            return f"{name.upper()} {self._line} {self._quote_rule}"
        whole = f"{text}({in_regex(self._form.line)}){'' if least else '?'}{end}"
        self.rules.append(f"{name.upper()}: /{whole}/" + (f" & ~/(?s:.*{end}.+)/" if least else ""))
        self.rules.append(f"{name}[lazy]: {name.upper()}")
        return name

    def _json(self, schema: Any) -> str:
        around = {key: self._tool.parameters[key] for key in ("$defs", "definitions") if key in self._tool.parameters}
        whole = {**schema, **around} if isinstance(schema, Mapping) else {}
        self._has_limits |= whole.get("type") != "null" and not whole.keys() <= {*_BARE, *around}
        return f"{self._rule(value_of(whole))} {self._line} {self._quote_rule}"

    def _literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self._quote in text or typed(text, self._kinds) != json.dumps(value, ensure_ascii=False):
            raise self._refused(f"the text {text[:64]!r}")
        self._has_limits |= not isinstance(value, str | None)
        return f"{quoted(text) if text else ''} {self._line} {self._quote_rule}"
