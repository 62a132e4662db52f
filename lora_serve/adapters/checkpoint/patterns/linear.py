"""Regular expressions matched by RE2, in time linear in the name, where RE2 and Python's `re` mean the same by them.

The two differ in many ways: `\\Z`, `{,n}`, possessive repeats, octal escapes, `[[:alpha:]]`, flags in the middle, what
is a digit, a letter or a case beyond ASCII. So a pattern comes here only if it is made of nothing but `_TOKEN`, `re`
takes it too, and every name is plain ASCII; `tests/adapters/checkpoint/patterns/test_linear.py` holds both side by
side. RE2 has no look-around and no back-reference, and gives up the GIL while it works. (Cox, "Regular Expression
Matching Can Be Simple And Fast", 2007.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import re2

_MAX_MEMORY = 2**20  # bytes of one pattern's program and automaton: beyond it RE2 refuses the pattern, or gets slower
_NAME = re.compile(r"[!-~]+")
_TOKEN = r"""
    [A-Za-z0-9_,/:;=@!"\#%&'<>~`\ -]                                 # itself
  | \\[./dDwWsSb-]
  | \((?:\?:|\?P<[A-Za-z_][A-Za-z0-9_]{0,30}>)?(?![?])
  | [.^$|)]
  | (?:[*+?]|\{[0-9]{1,3}(?:,[0-9]{0,3})?\})\??(?![*+?{])
  | \[\^?(?:\\[./dws-]|[A-Za-z0-9_.,/-])+\]
"""
_COMMON = re.compile(rf"(?:\(\?i\))?(?:{_TOKEN})*", re.VERBOSE)


def is_linear(expression: str, names: Sequence[str]) -> bool:
    """True if RE2 reads the expression, on these names, as Python's `re` does."""
    return bool(_COMMON.fullmatch(expression)) and all(map(_NAME.fullmatch, names)) and _is_taken(expression)


def compiled(expression: str) -> re2._Regexp:
    """The compiled expression, which must be linear (see `is_linear`)."""
    return re2.compile(expression, _options())


def _is_taken(expression: str) -> bool:
    """True if both engines take the expression: one that only one of them takes has no common meaning."""
    try:
        re.compile(expression)
        compiled(expression)
    except (re.error, re2.error, RecursionError, OverflowError):
        return False
    return True


def _options() -> re2.Options:
    options = re2.Options()
    options.never_capture = True
    options.log_errors = False
    options.max_mem = _MAX_MEMORY
    return options
