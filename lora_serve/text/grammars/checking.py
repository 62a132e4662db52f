"""A constraint -> a grammar that was compiled once, or an error with the place."""

from __future__ import annotations

from lora_serve.core.config import GrammarConfig
from lora_serve.text.grammars.compiling import GrammarCompiler
from lora_serve.text.grammars.constraint import Constraint, ConstraintKind
from lora_serve.text.grammars.faults import grammar_fault, refused, regex_fault, schema_fault
from lora_serve.text.grammars.translation import grammar_text


def checked_text(constraint: Constraint, compiler: GrammarCompiler, config: GrammarConfig) -> str:
    """The text of the grammar. Raises InvalidRequestError."""
    text = grammar_text(constraint, config.max_bytes)
    error = compiler.fault(text)
    if not error:
        return text
    if constraint.kind in (ConstraintKind.JSON, ConstraintKind.JSON_OBJECT):
        raise refused(constraint.param, schema_fault(error))
    describe = regex_fault if constraint.kind is ConstraintKind.REGEX else grammar_fault
    raise refused(constraint.param, describe(error))


def check_text(text: str, param: str, compiler: GrammarCompiler) -> None:
    """Check a grammar in the form of `llguidance`. Raises InvalidRequestError."""
    if error := compiler.fault(text):
        raise refused(param, grammar_fault(error))
