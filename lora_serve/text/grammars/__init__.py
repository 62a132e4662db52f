"""Structured output: what a caller asks an answer to be -> a grammar in the text form of `llguidance`, checked.

Here stand the caller's words for it, and those that refuse them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from lora_serve.core.errors import InvalidRequestError


class ConstraintKind(enum.StrEnum):
    """The forms in which a caller may say what an answer must be."""

    JSON = "json"  # a JSON schema, as a value or as its text
    JSON_OBJECT = "json_object"  # any JSON object
    REGEX = "regex"
    CHOICE = "choice"  # one of some texts
    GRAMMAR = "grammar"  # Lark or GBNF
    STRUCTURAL_TAG = "structural_tag"  # free text in which tags begin that hold something structured


# Between two parts of a JSON text: one space, or a line's end with its indentation. JSON itself allows any number, in
# which a small model can go on until `max_tokens`.
BLANKS = r"[ ]|\r?\n[ \t]{0,24}"


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """The blanks between the parts of a JSON text, and the properties that a schema does not name."""

    any_whitespace: bool = True
    whitespace_pattern: str | None = None  # a regex; None: `BLANKS`
    named_properties_only: bool = False  # schemas with `properties` and no `additionalProperties` allow no others


@dataclass(frozen=True, slots=True)
class Constraint:
    """One field of a request that says what the answer must be. `source` is not checked yet."""

    kind: ConstraintKind
    source: Any
    param: str  # the field's place in the body, for errors
    style: JsonStyle = JsonStyle()


MAX_LENGTH = 300  # characters of what is quoted of a caller's text, or said about it
_CARET = re.compile(r"^( *)\^+ *$", re.MULTILINE)
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): *(.*)", re.DOTALL)
_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_INDENT = 4  # of the pattern in an error of the regex parser


def refused(param: str, message: str, place: str = "") -> InvalidRequestError:
    """The error of the field `param`, with the place inside it."""
    where = f" at {shortened(place)}" if place else ""
    return InvalidRequestError(f"`{param}`{where}: {shortened(message)}", param=param)


def shortened(text: str) -> str:
    """The text on one line, cut if it is long."""
    line = " ".join(text[: 2 * MAX_LENGTH].split())
    return line if len(line) <= MAX_LENGTH else f"{line[:MAX_LENGTH]}..."


def schema_fault(error: str) -> str:
    """The reason for which `llguidance` refuses a schema."""
    if (keywords := _KEYWORDS.match(error)) is not None:
        return f"not supported: {keywords.group(1).replace(chr(34), '`')}"
    if error.startswith("oneOf constraints"):
        return "not supported: `oneOf` whose schemas may hold for the same value; use `anyOf`"
    if error.startswith("Resource"):
        return "a `$ref` to another document is not followed"
    return _of_regex(error) or error


def regex_fault(error: str) -> str:
    """The reason for which `llguidance` refuses a regex, with the position in it."""
    return _of_regex(error) or _POSITION.sub(r"\3", error.partition("\n")[0])


def grammar_fault(error: str) -> str:
    """The reason for which `llguidance` refuses a grammar, with line and column."""
    found = _POSITION.match(error)
    if found is None:
        return _of_regex(error) or error.partition("\n")[0]
    line, column, rest = found.groups()
    return f"line {line}, column {column}: {_of_regex(rest) or rest.partition(chr(10))[0]}"


def _of_regex(error: str) -> str:
    """The regex parser's reason, which stands in the last line of a drawing; empty if there is none."""
    reason, caret = _REGEX_ERROR.search(error), _CARET.search(error)
    if reason is None:
        return ""
    position = f" (character {len(caret.group(1)) - _INDENT + 1} of the regex)" if caret else ""
    return reason.group(1) + position
