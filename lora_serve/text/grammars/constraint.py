"""A caller's words for what an answer must be."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


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
