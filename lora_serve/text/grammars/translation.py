"""A constraint -> the text of a grammar, as `LLMatcher.grammar_from_json_schema` and its siblings would write it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.core.strict_json import JsonError, parse_json
from lora_serve.text.grammars.constraint import BLANKS, Constraint, ConstraintKind, JsonStyle, refused
from lora_serve.text.grammars.gbnf import is_lark, to_lark
from lora_serve.text.grammars.schema import SchemaWriter
from lora_serve.text.grammars.tags import TagWriter

MAX_RULES = 500  # the compiler follows rules by recursion: a stack of 8 MB overflows at some 3000 in a chain
MAX_GROUPS = 1000  # in all rules: they count as much, where a chain leads through them
_GROUP = re.compile(r"[(\[]")
# A string or a regex that does not end is one all the same, so that each character is looked at once.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/?|(?P<json>%json)\b|(?P<name><[^<>\s]+>)')
_BLANKS = re.compile(r"\s*")
MAX_DEPTH = 100  # of values inside one another; the parser's own limit is a little higher
_ESCAPES = '"\\bfnrt'  # not \u: with it a property could be given under a spelling that the schema does not see
LARK_FACTOR = 2  # a grammar may be so many times as long as a regex
_OPTIONS = "x-guidance"  # the keyword in a schema under which `llguidance` finds its options
_SPACING = frozenset(("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"))
_DEFAULT_STYLE = JsonStyle()
_FIXED: Mapping[str, Any] = MappingProxyType(
    {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": _ESCAPES}
)
_ANY_OBJECT = {"type": "object"}
_MAX_REGEX = "--max-regex-size"


def grammar_text(constraint: Constraint, config: GrammarConfig, special_ids: Mapping[str, int]) -> str:
    """The text of the grammar, which may still be wrong. `special_ids`: of special tokens, by their text.

    Raises InvalidRequestError.
    """
    check_size(
        len((constraint.style.whitespace_pattern or "").encode()), constraint.param, config.max_regex_size, _MAX_REGEX
    )
    match constraint.kind:
        case ConstraintKind.JSON:
            return schema_grammar(json_schema_of(constraint, config), constraint.style)
        case ConstraintKind.JSON_OBJECT:
            return schema_grammar(_ANY_OBJECT, constraint.style)
        case ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(_text_of(constraint, config.max_regex_size)))
        case ConstraintKind.CHOICE:
            return _choice(constraint, config.max_grammar_size)
        case ConstraintKind.GRAMMAR:
            return _grammar(constraint, config, special_ids)
        case ConstraintKind.STRUCTURAL_TAG:
            return _structural_tag(constraint, config, special_ids)


def schema_grammar(schema: Mapping[str, Any], style: JsonStyle) -> str:
    """The text of the grammar of a JSON schema."""
    return '{"grammars":[{"json_schema":%s}]}' % styled(schema, style)  # noqa: UP031 (braces)


def styled(schema: Mapping[str, Any], style: JsonStyle, spacing: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The text of a schema with the options of `llguidance` in it. `spacing`: options that win over the style's."""
    usual = BLANKS if style.any_whitespace else None
    pattern = usual if style.whitespace_pattern is None else style.whitespace_pattern
    blanks = {"whitespace_flexible": style.any_whitespace, "whitespace_pattern": pattern}
    options = {**blanks, **_FIXED, **spacing}
    return written({**schema, _OPTIONS: options})


def content(constraint: Constraint) -> bytes:
    """The constraint as bytes: equal ones ask for the same. Its source should not be large, see `measured`."""
    style = constraint.style
    return written((constraint.kind, constraint.source, astuple(style))).encode()


def measured(value: Any, most: int) -> int:
    """Roughly the number of characters of a value's JSON text, never more; counted up to a little above `most`."""
    num_characters, left = 0, [value]
    while left and num_characters <= most:
        item = left.pop()
        num_characters += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            num_characters += sum(map(len, item))
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return num_characters


def depth_of(value: Any, most: int) -> int:
    """The depth of values inside one another; counted up to a little above `most`."""
    depth, level = 0, [value]
    while level and depth <= most:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for children in inner for child in children]
    return depth


def json_schema_of(constraint: Constraint, config: GrammarConfig) -> dict[str, Any]:
    """The schema of a constraint of the kind JSON, as `llguidance` gets it. Raises InvalidRequestError."""
    return _own_schema(constraint.source, constraint.param, constraint.style, config)


def safe_text(text: str, param: str, config: GrammarConfig, max_rules: int | None = None) -> str:
    """A grammar in the form of `llguidance` around schemas of a caller: the same, in which the schemas are as those of
    `json_schema_of`. `max_rules`: of a text that the caller wrote. Raises InvalidRequestError.
    """

    def schema(value: Any) -> str:
        style = _given_style(value, param)
        plain = {key: item for key, item in value.items() if key != _OPTIONS} if style else value
        return styled(_own_schema(plain, param, _DEFAULT_STYLE, config), _DEFAULT_STYLE, style)

    if max_rules is not None or not text.lstrip().startswith("{"):
        return with_schemas(text, param, schema, max_rules)
    grammars = json.loads(text)["grammars"]
    for grammar in grammars:
        if grammar.get("json_schema") is not None:
            grammar["json_schema"] = json.loads(schema(grammar["json_schema"]))
        if grammar.get("lark_grammar") is not None:
            grammar["lark_grammar"] = with_schemas(grammar["lark_grammar"], param, schema, max_rules)
    return written({"grammars": grammars})


def written(value: Any) -> str:
    """The JSON text of a value."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _own_schema(source: Any, param: str, style: JsonStyle, config: GrammarConfig) -> dict[str, Any]:
    schema = read_schema(source, param, config.max_grammar_size)
    return SchemaWriter(param, config.max_regex_size, named_only=style.named_properties_only).write(schema)


def _given_style(schema: Any, param: str) -> Mapping[str, Any]:
    """The options that a schema in Lark brings itself: of blanks, and no others. Raises InvalidRequestError."""
    given = schema.get(_OPTIONS) if isinstance(schema, dict) else None
    if given is None:
        return {}
    if not isinstance(given, dict) or any(given[name] != value for name, value in _FIXED.items() if name in given):
        raise refused(param, f"`{_OPTIONS}` must be an object that leaves {', '.join(_FIXED)} as they are")
    if not given.keys() <= _SPACING | _FIXED.keys():
        raise refused(param, f"`{_OPTIONS}` may hold {', '.join(sorted(_SPACING))} only")
    return given


def _choice(constraint: Constraint, max_bytes: int) -> str:
    choices, param = constraint.source, constraint.param
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise refused(param, "expected a list of one or more strings.")
    check_size(sum(len(choice.encode()) + 1 for choice in choices), param, max_bytes)
    named = [written(choice) for choice in dict.fromkeys(choices) if choice]
    if not named:
        return 'start: ""'
    # One terminal for all: as alternatives of a rule, each would be looked at for every token.
    start = 'CHOICE | ""' if "" in choices else "CHOICE"
    return f"start: {start}\nCHOICE: {' | '.join(named)}"


def _grammar(constraint: Constraint, config: GrammarConfig, special_ids: Mapping[str, int]) -> str:
    text, param = _text_of(constraint, LARK_FACTOR * config.max_regex_size), constraint.param
    try:
        text = text if is_lark(text) else to_lark(text)
    except ValueError as error:
        raise refused(param, str(error)) from None
    found = with_numbers(safe_text(text, param, config, MAX_RULES), special_ids)
    check_size(len(found.encode()), param, LARK_FACTOR * config.max_regex_size, "twice --max-regex-size")
    return found


def _structural_tag(constraint: Constraint, config: GrammarConfig, special_ids: Mapping[str, int]) -> str:
    source, param = constraint.source, constraint.param
    if isinstance(source, str):
        check_size(len(source.encode()), param, config.max_grammar_size)
        source = _parsed(source, param)
    if depth_of(source, MAX_DEPTH) > MAX_DEPTH:
        raise refused(param, f"nested more than {MAX_DEPTH} deep.")
    style = constraint.style
    return TagWriter(
        param, lambda value: styled(_own_schema(value, param, style, config), style), special_ids, config.max_regex_size
    ).write(source)


def read_schema(source: Any, param: str, max_bytes: int) -> dict[str, Any]:
    """A JSON schema, given as a value or as its text. Raises InvalidRequestError."""
    if isinstance(source, str):
        check_size(len(source.encode()), param, max_bytes)
        source = _parsed(source, param)
    if isinstance(source, bool):
        source = {} if source else {"enum": []}
    if not isinstance(source, dict):
        raise refused(param, "expected a JSON schema, which is an object.")
    if depth_of(source, MAX_DEPTH) > MAX_DEPTH:
        raise refused(param, f"nested more than {MAX_DEPTH} deep.")
    if _OPTIONS in source:
        raise refused(param, "`x-guidance` is not taken from a request.")
    return source


def check_size(num_bytes: int, param: str, max_bytes: int, flag: str = "--max-grammar-size") -> None:
    """Raises InvalidRequestError."""
    if num_bytes > max_bytes:
        raise refused(param, f"{num_bytes} bytes are more than {max_bytes} ({flag}).")


def _text_of(constraint: Constraint, max_bytes: int) -> str:
    if not isinstance(constraint.source, str):
        raise refused(constraint.param, "expected a string.")
    check_size(len(constraint.source.encode()), constraint.param, max_bytes, _MAX_REGEX)
    return constraint.source


def _parsed(text: str, param: str) -> Any:
    try:
        return parse_json(text.encode())
    except JsonError as error:
        raise refused(param, f"the text {error}") from None


def with_schemas(text: str, param: str, rewrite: Callable[[Any], str], max_rules: int | None) -> str:
    """The grammar with the JSON schema behind each `%json` written anew.

    `max_rules`: of a text that a caller wrote; None: the server did, so that its literals are what they seem to be.
    Raises InvalidRequestError.
    """
    parts: list[str] = []
    outside: list[str] = []
    at = 0
    found = _TOKEN.search(text)
    while found is not None:
        if found["json"] is None:
            found = _TOKEN.search(text, found.end())
            continue
        start = _BLANKS.match(text, found.end())
        assert start is not None, "it matches nothing, too"
        try:
            schema, end = json.JSONDecoder().raw_decode(text, start.end())
        except (ValueError, RecursionError):
            line = text.count("\n", 0, found.start()) + 1
            raise refused(param, f"line {line}: no JSON schema stands behind %json") from None
        outside.append(text[at : found.start()])
        parts += [text[at : found.start()], "%json ", rewrite(schema)]
        at = end
        found = _TOKEN.search(text, end)
    outside.append(text[at:])
    if max_rules is not None:
        _check_outside("".join(outside), param, max_rules)
    return "".join(parts) + text[at:]


def with_numbers(text: str, special_ids: Mapping[str, int]) -> str:
    """The grammar with the ids of the special tokens that it names as `<name>`; one that is unknown stays."""

    def numbered(found: re.Match[str]) -> str:
        number = special_ids.get(found["name"] or "")
        return found[0] if number is None else f"<[{number}]>"

    return _TOKEN.sub(numbered, text)


def _check_outside(text: str, param: str, max_rules: int) -> None:
    """Check the grammar without its schemas; each rule has a colon. Raises InvalidRequestError."""
    if "%json" in text:
        raise refused(param, "`%json` stands in a text, a regex or a comment")
    if text.count(":") > max_rules:
        raise refused(param, f"more than {max_rules} rules")
    if len(_GROUP.findall(_TOKEN.sub("", text))) > MAX_GROUPS:
        raise refused(param, f"more than {MAX_GROUPS} groups in brackets")


_SPACE = "/[ \\t\\r\\n]{0,8}/"  # what models write behind their reasoning; more of it would never have to end


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning before an answer: any text up to a marker."""

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    is_open: bool  # the prompt has written the opening marker, which may come again; else it may come, or the answer


def joined_grammars(texts: Sequence[str], thinking: Thinking | None, token_ids: Mapping[str, int]) -> str:
    """A grammar of what one of `texts` allows, after `thinking`.

    `token_ids`: the ids of markers that are single tokens, which are then produced as these tokens.
    """
    if thinking is None and len(texts) == 1:
        return texts[0]
    names = [f"answer_{number}" for number in range(len(texts))]
    parts = [part for name, text in zip(names, texts, strict=True) for part in _named(text, name)]
    answer = "(" + " | ".join(f"@{name}" for name in names) + ")"
    if thinking is None:
        return _written([f"start: {answer}"], parts)
    opened = _choice_of_markers(thinking.opening, token_ids)
    start = f"start: {opened}? thought {answer}" if thinking.is_open else f"start: ({opened} thought)? {answer}"
    return _written([start, *_thought(thinking.closing, token_ids)], parts)


def _thought(closing: tuple[str, ...], token_ids: Mapping[str, int]) -> list[str]:
    if all(marker in token_ids for marker in closing):
        return [f"thought: TEXT {_choice_of_markers(closing, token_ids)} {_SPACE}", "TEXT: /(?s:.*)/"]
    ends = "|".join("".join(f"\\x{{{ord(character):x}}}" for character in marker) for marker in closing)
    return [f"thought: ended {_SPACE}", f"ended[lazy]: /(?s:.*)({ends})/"]


def _choice_of_markers(markers: tuple[str, ...], token_ids: Mapping[str, int]) -> str:
    written = [
        f"<[{token_ids[marker]}]>" if marker in token_ids else json.dumps(marker, ensure_ascii=False)
        for marker in markers
    ]
    return f"({' | '.join(written)})"


def _named(text: str, name: str) -> list[dict[str, Any]]:
    """The parts of a grammar, of which the first gets a name."""
    if not text.lstrip().startswith("{"):
        return [{"name": name, "lark_grammar": text}]
    first, *others = json.loads(text)["grammars"]
    return [{**first, "name": name}, *others]


def _written(rules: list[str], parts: list[dict[str, Any]]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules) + "\n"}, *parts]}, ensure_ascii=False)
