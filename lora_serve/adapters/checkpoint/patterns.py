"""Matching regular expressions that strangers wrote.

PEFT's configs name modules by Python regexes, so `re` is the only exact reader of them; but `re` can take years and
holds the GIL. A pattern that cannot blow up is matched here; any other in a child process that is killed after
`TIME_LIMIT`. (Davis et al., "The Impact of Regular Expression Denial of Service", ESEC/FSE 2018.)
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.core.errors import InvalidAdapterError

TIME_LIMIT = 5.0  # seconds, for all patterns of one adapter together
MAX_LENGTH = 4096  # characters of one pattern
_MAX_REPEATS = 3
_MAX_HERE = 16  # patterns with any choice in them that are matched here; each is quick, thousands of them are not
_CHOICE = re.compile(r"[*+?{|]")
_REPEAT = re.compile(r"(?<!\()[*+?{][?+]?")
_DANGER = re.compile(r"\)[*+?{]|\(\?[^:]|\\[1-9]")  # repeated group, look-around or flag, back-reference

_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
patterns, names = json.load(sys.stdin)
def matched(pattern, whole):
    compiled = re.compile(pattern)
    find = compiled.fullmatch if whole else compiled.match
    return [index for index, name in enumerate(names) if find(name)]
print(json.dumps([matched(*pattern) for pattern in patterns]))
"""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regex as PEFT applies it: to a whole module path, or (`rank_pattern`) to the end of one after a dot."""

    text: str
    whole: bool

    @property
    def expression(self) -> str:
        """For `re.fullmatch` if `whole`, else for `re.match`."""
        return self.text if self.whole else rf"(.*\.)?({self.text})$"


def match_names(patterns: Sequence[Pattern], names: Sequence[str]) -> list[frozenset[str]]:
    """For each pattern the names that it matches. Raises InvalidAdapterError: not a regex, too long, too slow."""
    _check(patterns)
    choosing = [pattern for pattern in patterns if _CHOICE.search(pattern.text)]
    risky = [pattern for pattern in patterns if not is_plain(pattern.text)]
    if len(choosing) > _MAX_HERE:
        risky = list(dict.fromkeys([*risky, *choosing]))
    slow = dict(zip(risky, _match_in_child(risky, names), strict=True)) if risky else {}
    return [slow[pattern] if pattern in slow else _match_here(pattern, names) for pattern in patterns]


def is_plain(text: str) -> bool:
    """Whether matching is at worst polynomial of a low degree: few repeats, none of them of a group, and alternatives
    in one place at most, as those of `(a|a)(a|a)...` multiply.
    """
    num_repeats = len(_REPEAT.findall(text))
    is_branching = "|" in text and (num_repeats > 1 or text.count("(") > 1)
    return not (_DANGER.search(text) or is_branching) and num_repeats <= _MAX_REPEATS


def _check(patterns: Sequence[Pattern]) -> None:
    for pattern in patterns:
        if len(pattern.text) > MAX_LENGTH:
            raise InvalidAdapterError(
                [f"a module pattern of {len(pattern.text)} characters: at most {MAX_LENGTH} are allowed"]
            )


def _match_here(pattern: Pattern, names: Sequence[str]) -> frozenset[str]:
    try:
        compiled = re.compile(pattern.expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidAdapterError([f"module pattern {pattern.text[:200]!r} is not a regex: {error}"]) from None
    find = compiled.fullmatch if pattern.whole else compiled.match
    return frozenset(name for name in names if find(name))


def _match_in_child(patterns: Sequence[Pattern], names: Sequence[str]) -> list[frozenset[str]]:
    question = json.dumps([[[pattern.expression, pattern.whole] for pattern in patterns], list(names)])
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=TIME_LIMIT, check=True)
    except subprocess.TimeoutExpired:
        raise InvalidAdapterError(["a module pattern takes too long to match: list the modules instead"]) from None
    except subprocess.CalledProcessError:
        shown = ", ".join(repr(pattern.text[:100]) for pattern in patterns[:3])
        raise InvalidAdapterError([f"a module pattern is not a regex that can be matched: {shown}"]) from None
    return [frozenset(names[index] for index in indices) for indices in json.loads(done.stdout)]
