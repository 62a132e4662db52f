"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`.

Source: the chat template of google/gemma-4-E2B-it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.pieces import MAX_SHORT, NAME, Literals, Reader, Reading, Sink, inner_json, number_json
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    lark,
    marker,
    members_of,
    quoted,
    sequence,
    value_of,
)
from lora_serve.text.typed_text import referred

_KEY = re.compile(r"[^\s:,{}\[\]<]+")
_UNTOLD = ("allOf", "not", "if", "pattern", "contains", "uniqueItems", "prefixItems")
_MAX_RULES = 2000  # of one tool, for values in one another: with three times as many the compiler's stack overflows
_ANY = {"type": ["string", "number", "boolean", "null"]}


class Format(ToolCallFormat):
    """Calls one after another, each between markers; keys without quotes, and a marker as the quote of strings."""

    begin: ClassVar[str] = "<|tool_call>"
    end: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'
    markers = (begin, end, quote)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.begin in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        rules = Rules(self.quote, marker(self.quote, token_ids))
        calls = [rules.call(tool) for tool in tools]
        block = f"block: {marker(self.begin, token_ids)} ({' | '.join(calls)}) {marker(self.end, token_ids)}"
        return lark("block+" if parallel else "block", [block, *rules.rules])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        reader = answer.reader

        def call(_begin: str) -> Reading[CallEnd]:
            """Read a call as far as it is one."""
            yield from reader.spaces()
            name = ""
            if (yield from reader.literal("call:")) != "":
                name = yield from reader.word(NAME, MAX_SHORT)
            next_one = yield from reader.peek()
            if not name or next_one != "{":
                return CallEnd.CUT if next_one == "" else CallEnd.NO_CALL
            answer.start(name)
            yield from _Literals(reader, answer.arguments, self.quote).value()
            return CallEnd.COMPLETE

        return answer.marked_calls((self.begin,), call, lambda: answer.next_begin(self.begin, self.end))


class _Literals(Literals):
    """Reader of strings between markers, numbers, true, false and null; another word is taken as a string."""

    def __init__(self, reader: Reader, sink: Sink, quote: str) -> None:
        super().__init__(reader, sink)
        self._quote = quote

    def scalar(self, text: str) -> str | None:
        if text in ("true", "false", "null") or number_json(text):
            return text
        return json.dumps(text, ensure_ascii=False) if text else None

    def key(self) -> Reading[bool]:
        key = yield from self.reader.word(_KEY, MAX_SHORT)
        if not key:
            return bool((yield from self.string()))
        if (yield from self.reader.peek()) == "":
            return False
        self.sink(f'"{inner_json(key)}"')
        return True

    def string(self) -> Reading[bool | None]:
        if (yield from self.reader.literal(self._quote)) == "":
            return None
        self.sink('"')
        if (yield from self.reader.until((self._quote,), self._inner)) == "":
            return False
        self.sink('"')
        return True

    def _inner(self, piece: str) -> None:
        if not self.reader.is_ended:  # else it is the beginning of a marker that was cut
            self.sink(inner_json(piece))


class Rules:
    """The rules of calls and values, collected in `rules` as they are asked for."""

    def __init__(self, quote: str, quote_rule: str) -> None:
        """`quote_rule`: how a grammar names the marker `quote`."""
        self.rules: list[str] = []
        self._quote = quote
        self._quote_rule = quote_rule
        self._num_rules = 0
        self._tool: Tool = Tool("")
        self._of_refs: dict[str, str] = {}
        self._first_rule = 0  # of the tool's

    def call(self, tool: Tool) -> str:
        """The rule of a tool's call."""
        self._tool, self._of_refs, self._first_rule = tool, {}, len(self.rules)
        return self._rule(self._call(tool))

    def _call(self, tool: Tool) -> str:
        return f"{quoted(f'call:{tool.name}')} {self._object(tool.parameters)}"

    def _rule(self, body: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {body}")
        if len(self.rules) - self._first_rule > _MAX_RULES:
            raise self._refused("so many members")
        return name

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"value_{self._num_rules}"

    def _refused(self, what: str) -> InvalidRequestError:
        message = f"Parameters of tool {self._tool.name!r}: this model's tool-call format cannot force {what}"
        return InvalidRequestError(f"{message}; leave it out, or use tool_choice auto", param="tools")

    def _value(self, schema: Any) -> str:
        """What stands for a value that obeys `schema`, in a rule's body."""
        if not isinstance(schema, Mapping) or not schema:
            schema = _ANY
        for word in _UNTOLD:
            if word in schema:
                raise self._refused(f"a value with {word}")
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]))
        if "const" in schema:
            return self._literal(schema["const"])
        if "enum" in schema:
            return f"({' | '.join(map(self._literal, schema['enum']))})"
        for word in ("anyOf", "oneOf"):
            if word in schema:
                if "properties" in schema or "items" in schema:
                    raise self._refused(f"a value with both {word} and properties or items")
                return f"({' | '.join(map(self._value, schema[word]))})"
        kinds = schema.get("type", _ANY["type"])
        if not isinstance(kinds, str):
            return f"({' | '.join(self._of_kind({**schema, 'type': kind}, str(kind)) for kind in kinds)})"
        return self._of_kind(schema, kinds)

    def _of_kind(self, schema: Mapping[str, Any], kind: str) -> str:
        if kind == "string":
            return f"{self._quote_rule} {self._rule(self._text(schema))} {self._quote_rule}"
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return self._rule(value_of(schema))

    def _text(self, schema: Mapping[str, Any]) -> str:
        """The inside of a string. The letter with which the marker begins is left out, so that it cannot be spelled."""
        least, longest = int(schema.get("minLength", 0)), schema.get("maxLength")
        most = "" if longest is None else int(longest)
        return f"/[^<]{{{least},{most}}}/"

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._rule(self._value(schema.get("items")))
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return quoted("[]")
        more = f"({quoted(',')} {item}){{{max(least - 1, 0)},{'' if most is None else int(most) - 1}}}"
        if most == 1:
            more = ""
        inside = f"{item} {more}"
        return f"{quoted('[')} {inside if least else f'({inside})?'} {quoted(']')}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        members = members_of(schema, f"Parameters of tool {self._tool.name!r}")
        pairs = []
        for name, (member, is_required) in members.items():
            if not _KEY.fullmatch(name):
                message = f"Tool {self._tool.name!r}: {name!r} cannot be the name of a parameter"
                raise InvalidRequestError(message, param="tools")
            pairs.append((self._rule(f"{quoted(f'{name}:')} {self._value(member)}"), is_required))
        if not pairs:
            return quoted("{}")
        inside = self._new_name()
        self.rules += sequence(inside, pairs, quoted(","))
        return f"{quoted('{')} {inside} {quoted('}')}"

    def _referred(self, reference: str) -> str:
        if reference not in self._of_refs:
            name = self._of_refs[reference] = self._new_name()
            if (target := referred(reference, self._tool.parameters)) is None:
                raise self._refused(f"the reference {reference!r}, which names nothing here")
            self.rules.append(f"{name}: {self._value(target)}")
        return self._of_refs[reference]

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            if self._quote in value:
                raise self._refused(f"a text that holds {self._quote}")
            return f"{self._quote_rule} {quoted(value) if value else ''} {self._quote_rule}"
        comma = f" {quoted(',')} "
        if isinstance(value, list):
            return f"{quoted('[')} {comma.join(map(self._literal, value))} {quoted(']')}"
        if isinstance(value, dict):
            pairs = (f"{quoted(f'{key}:')} {self._literal(inner)}" for key, inner in value.items())
            return f"{quoted('{')} {comma.join(pairs)} {quoted('}')}"
        return quoted(json.dumps(value))
