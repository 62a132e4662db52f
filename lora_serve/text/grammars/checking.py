"""A constraint -> a grammar that was compiled once, or an error with the place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.grammars import GrammarConfig
from lora_serve.text.grammars.compiling import GrammarCompiler
from lora_serve.text.grammars.constraint import Constraint, ConstraintKind
from lora_serve.text.grammars.faults import grammar_fault, refused, regex_fault, schema_fault
from lora_serve.text.grammars.schema import subschemas
from lora_serve.text.grammars.translation import grammar_text, json_schema_of, safe_text, schema_grammar

MAX_SECONDS = 0.3  # for the search; the place found by then is shown
_DEFINITIONS = ("$defs", "definitions")


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


def faulty_place(schema: Mapping[str, Any], error: str, fault: Callable[[Mapping[str, Any]], str]) -> str:
    """JSON pointer of the innermost schema that has the same error by itself: `llguidance` says what is wrong, not
    where. `fault`: the error of a schema.
    """
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    place, inner, until = "#", schema, time.monotonic() + MAX_SECONDS
    while True:
        for pointer, child in subschemas(inner):
            if time.monotonic() > until:
                return place
            if isinstance(child, dict) and fault({**definitions, **child}) == error:
                place, inner = place + pointer, child
                break
        else:
            return place
