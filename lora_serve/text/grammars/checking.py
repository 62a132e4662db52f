"""A constraint -> the text of a grammar, that was compiled once, or an error with the place.

The text is as `LLMatcher.grammar_from_json_schema` and its siblings would write it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.core.strict_json import JsonError, depth_of, parse_json
from lora_serve.text.grammars import (
    BLANKS,
    Constraint,
    ConstraintKind,
    JsonStyle,
    grammar_fault,
    refused,
    regex_fault,
    schema_fault,
)
from lora_serve.text.grammars.lark import TagWriter, is_lark, to_lark, with_numbers, with_schemas
from lora_serve.text.grammars.schema import SchemaWriter, faulty_place

MAX_RULES = 500  # the compiler follows rules by recursion: a stack of 8 MB overflows at some 3000 in a chain
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
    param, style = constraint.param, constraint.style
    source = _parsed(constraint.source, param, config.max_grammar_size)
    if depth_of(source) > MAX_DEPTH:
        raise refused(param, f"nested more than {MAX_DEPTH} deep.")
    return TagWriter(
        param, lambda value: styled(_own_schema(value, param, style, config), style), special_ids, config.max_regex_size
    ).write(source)


def read_schema(source: Any, param: str, max_bytes: int) -> dict[str, Any]:
    """A JSON schema, given as a value or as its text. Raises InvalidRequestError."""
    source = _parsed(source, param, max_bytes)
    if isinstance(source, bool):
        source = {} if source else {"enum": []}
    if not isinstance(source, dict):
        raise refused(param, "expected a JSON schema, which is an object.")
    if depth_of(source) > MAX_DEPTH:
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


def _parsed(source: Any, param: str, max_bytes: int) -> Any:
    """The value, which may be given as its text. Raises InvalidRequestError."""
    if not isinstance(source, str):
        return source
    check_size(len(source.encode()), param, max_bytes)
    try:
        return parse_json(source.encode())
    except JsonError as error:
        raise refused(param, f"the text {error}") from None


NUM_BYTES = 256
NUM_STEPS = 5  # into a grammar, which are tried
MAX_SECONDS = 2.0  # of the processor, for all of it
MAX_STEP_SECONDS = 0.1  # of the processor, for one: other rows wait for it
TOO_COSTLY = "too costly: make it shorter, or less ambiguous"
MAX_ROW_ITEMS = 10_000  # four for each property that may come next: an object may have 2000
UNSATISFIABLE = "no text satisfies it"


def parser_limits(config: GrammarConfig) -> LLParserLimits:
    """The limits in the terms of `llguidance`. Its messages say nothing of the parser's state."""
    return LLParserLimits(
        initial_lexer_fuel=config.max_lexer_work,
        step_max_items=config.max_grammar_items,
        max_items_in_row=min(MAX_ROW_ITEMS, config.max_grammar_items),
        max_lexer_states=config.max_lexer_states,
        max_grammar_size=config.max_grammar_symbols,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens as `TokenizerWrapper` wants them: the special ones at their own ids, and one for each byte."""

    tokens: list[bytes]
    special_token_ids: list[int]
    byte_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: bytes | str) -> list[int]:
        return [self.byte_ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


class GrammarCompiler:
    """Compiles grammars for one vocabulary, within limits; immutable, used by several threads."""

    def __init__(self, special_tokens: Mapping[int, str], vocab_size: int, config: GrammarConfig) -> None:
        """`special_tokens`: by id, those that a grammar may name as `<name>`."""
        self.special_ids = {content: number for number, content in special_tokens.items()}
        self._limits = parser_limits(config)
        vocabulary = _vocabulary(special_tokens, vocab_size)
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), slices=[])
        # What a text begins with most often, then the rest: a few steps into a grammar show what is too large in it.
        self._tried = [*(vocabulary.byte_ids[byte] for byte in b'{"['), *vocabulary.byte_ids[33:]]

    def fault(self, text: str) -> str:
        """The reason why a grammar cannot be used, in the words of `llguidance`; empty if it can.

        It runs without the GIL for most of its time.
        """
        began = time.thread_time()
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        slowest, is_first = 0.0, True
        for _ in range(NUM_STEPS):
            if matcher.is_stopped():
                break
            step_began = time.thread_time()
            allowed = matcher.compute_bitmask()
            slowest = max(slowest, time.thread_time() - step_began)
            number = next((i for i in self._tried if allowed[i // 8] >> (i % 8) & 1), None)
            if matcher.is_stopped() or number is None or not matcher.consume_token(number):
                break
            is_first = False
        if matcher.is_error() or (is_first and matcher.is_stopped() and not matcher.is_accepting()):
            error: str = matcher.get_error()
            return UNSATISFIABLE if not error or error.startswith("NoExtension") else error
        if slowest > MAX_STEP_SECONDS or time.thread_time() - began > MAX_SECONDS:
            return TOO_COSTLY
        return ""


def _vocabulary(special_tokens: Mapping[int, str], vocab_size: int) -> _Vocabulary:
    tokens = [b""] * max(vocab_size, max(special_tokens, default=0) + 1, NUM_BYTES + len(special_tokens))
    for number, content in special_tokens.items():
        tokens[number] = content.encode()
    free = (number for number in range(len(tokens)) if number not in special_tokens)
    byte_ids = [next(free) for _ in range(NUM_BYTES)]
    for byte, number in enumerate(byte_ids):
        tokens[number] = bytes((byte,))
    tokens.append(b"<end of text>")
    return _Vocabulary(tokens, [*special_tokens, len(tokens) - 1], byte_ids, len(tokens) - 1)


def checked_text(constraint: Constraint, compiler: GrammarCompiler, config: GrammarConfig) -> str:
    """The text of the grammar. Raises InvalidRequestError."""
    text = grammar_text(constraint, config, compiler.special_ids)
    error = compiler.fault(text)
    if not error:
        return text
    if constraint.kind is ConstraintKind.JSON:

        def fault(part: Mapping[str, Any]) -> str:
            try:  # by itself its references mean something else, and may cost too much
                alone = json_schema_of(replace(constraint, source=part), config)
            except InvalidRequestError:
                return ""
            return compiler.fault(schema_grammar(alone, constraint.style))

        place = faulty_place(json_schema_of(constraint, config), error, fault)
        raise refused(constraint.param, schema_fault(error), place)
    describe = regex_fault if constraint.kind is ConstraintKind.REGEX else grammar_fault
    raise refused(constraint.param, describe(error))


def checked_own_text(text: str, param: str, compiler: GrammarCompiler, config: GrammarConfig) -> str:
    """A grammar in the form of `llguidance` that the server made around schemas of a caller, see `safe_text`.

    Raises InvalidRequestError.
    """
    safe = safe_text(text, param, config)
    if error := compiler.fault(safe):
        raise refused(param, grammar_fault(error))
    return safe
