"""Patterns that strangers wrote, matched in bounded time, and the rank that they give a module by PEFT's rules."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import re2

from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError

_LITERAL = re.compile(r"(?:[A-Za-z0-9_]|\\?\.)+")
_CHARACTER = re.compile(r"\\?.")
_MAX_SHAPES = 64  # trainers' names have a few; as many as somebody likes would be as slow as any patterns

Shape = tuple[int, tuple[int, ...]]  # length, and where any character will do
Shapes = Mapping[Shape, Mapping[str, Sequence[str]]]  # -> blanked text -> patterns


def literals_in(texts: Sequence[str]) -> Shapes:
    """The patterns that are names, by shape; empty if there are too many shapes."""
    shapes: dict[Shape, dict[str, list[str]]] = {}
    for text in texts:
        if _LITERAL.fullmatch(text):
            characters = _CHARACTER.findall(text)
            blanks = tuple(index for index, character in enumerate(characters) if character == ".")
            blanked = _blanked("".join(character[-1] for character in characters), blanks)
            shapes.setdefault((len(characters), blanks), {}).setdefault(blanked, []).append(text)
    return shapes if len(shapes) <= _MAX_SHAPES else {}


def match_literals(shapes: Shapes, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """pattern -> the names that it matches, to the end and from their start or a dot on. Names without line breaks."""
    found: dict[str, list[str]] = {text: [] for table in shapes.values() for texts in table.values() for text in texts}
    for name in names:
        ends = {len(end): end for end in tails(name)}
        for (length, blanks), table in shapes.items():
            if length in ends:
                for text in table.get(_blanked(ends[length], blanks), ()):
                    found[text].append(name)
    return {text: frozenset(matched) for text, matched in found.items()}


def tails(name: str) -> Iterator[str]:
    """The name, and what comes after each of its dots."""
    yield name
    for match in re.finditer(r"\.", name):
        yield name[match.end() :]


def _blanked(text: str, blanks: Sequence[int]) -> str:
    for index in blanks:
        text = f"{text[:index]}\n{text[index + 1 :]}"
    return text


LINEAR_SECONDS = 1.0  # of the processor, for all of an adapter's patterns that are matched here
CHILD_SECONDS = 1.0  # likewise in the child process
PATIENCE = 20.0  # seconds that the child may take on a busy machine
MAX_LENGTH = 4096  # characters of one pattern
_TOO_SLOW = "a module pattern takes too long to match: list the modules instead"
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
_CHILD = """
import json, os, re, resource, signal, sys
signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
os.nice(10)
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
    """For each pattern the names that it matches.

    Raises InvalidAdapterError: not a regex, too long, too slow; AdapterUnavailableError: the machine is too busy.
    """
    _check(patterns)
    distinct = dict.fromkeys(patterns)
    found = match_literals(literals_in([pattern.text for pattern in distinct if not pattern.whole]), names)
    left = [pattern for pattern in distinct if pattern.whole or pattern.text not in found]
    linear = {pattern for pattern in left if is_linear(pattern.expression, names)}
    matched = _match_linear([pattern for pattern in left if pattern in linear], names)
    matched |= _match_in_child([pattern for pattern in left if pattern not in linear], names)
    return [matched[pattern] if pattern in matched else found[pattern.text] for pattern in patterns]


def _check(patterns: Sequence[Pattern]) -> None:
    for pattern in patterns:
        if len(pattern.text) > MAX_LENGTH:
            raise InvalidAdapterError(
                [f"a module pattern of {len(pattern.text)} characters: at most {MAX_LENGTH} are allowed"]
            )


def _match_linear(patterns: Sequence[Pattern], names: Sequence[str]) -> dict[Pattern, frozenset[str]]:
    end, found = time.thread_time() + LINEAR_SECONDS, {}
    for pattern in patterns:
        expression, matched = compiled(pattern.expression), []
        find = expression.fullmatch if pattern.whole else expression.match
        for name in names:
            if find(name):
                matched.append(name)
            if time.thread_time() > end:
                raise InvalidAdapterError([_TOO_SLOW])
        found[pattern] = frozenset(matched)
    re2.purge()  # it keeps what was compiled
    return found


def _match_in_child(patterns: Sequence[Pattern], names: Sequence[str]) -> dict[Pattern, frozenset[str]]:
    if not patterns:
        return {}
    question = json.dumps([[[pattern.expression, pattern.whole] for pattern in patterns], list(names)])
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(CHILD_SECONDS)]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except subprocess.TimeoutExpired:
        raise AdapterUnavailableError("The machine is too busy to match a module pattern; try again.") from None
    except subprocess.CalledProcessError as error:
        if error.returncode == -signal.SIGPROF:
            raise InvalidAdapterError([_TOO_SLOW]) from None
        shown = ", ".join(repr(pattern.text[:100]) for pattern in patterns[:3])
        raise InvalidAdapterError([f"a module pattern is not a regex that can be matched: {shown}"]) from None
    matched = [frozenset(names[index] for index in indices) for indices in json.loads(done.stdout)]
    return dict(zip(patterns, matched, strict=True))


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


@dataclass(frozen=True, slots=True)
class RankRules:
    """A rank and an alpha, and patterns for other ones; of those the first that matches a module counts."""

    r: int
    alpha: float
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    use_rslora: bool = False

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA (https://arxiv.org/abs/2312.03732)."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @property
    def largest(self) -> int:
        return max([self.r, *(rank for _, rank in self.rank_pattern)])


def ranks_and_scales(rules: RankRules, modules: Sequence[str]) -> dict[str, tuple[int, float]]:
    """module -> (rank, scale). Raises InvalidAdapterError (see patterns/patterns.py)."""
    ranks = _first_match(rules.rank_pattern, modules)
    alphas = _first_match(rules.alpha_pattern, modules)
    table = {}
    for module in modules:
        rank = int(ranks.get(module, rules.r))
        table[module] = rank, rules.scale(rank, alphas.get(module, rules.alpha))
    return table


def _first_match(patterns: Sequence[tuple[str, float]], modules: Sequence[str]) -> dict[str, float]:
    expressions = [Pattern(key, whole=False) for key, _ in patterns]
    found: dict[str, float] = {}
    for matched, (_, value) in zip(match_names(expressions, modules), patterns, strict=True):
        for module in matched:
            found.setdefault(module, value)
    return found
