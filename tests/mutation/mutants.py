"""Mutants by cosmic-ray's operators, and the sample of them that a seed draws.

The sample is spread over the packages in proportion to their lines, at most one mutant a line. What is drawn is decided
by a hash of the seed, the file, the line's text and the operator, so that an edit elsewhere draws the same mutants.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutation.left_out import is_left_out
from tests.mutation.places import PACKAGES, ROOT, files, package_of, shares

# The kinds of nodes that most operators look at; the others look at all but names, strings and ends of lines.
LOOKED_AT = {
    "ReplaceBinaryOperator": {"operator"},
    "ReplaceComparisonOperator": {"comparison"},
    "ReplaceUnaryOperator": {"factor", "not_test"},
}
OVERLOOKED = {"name", "string", "newline", "operator", "fstring_string", "fstring_start", "fstring_end"}


@dataclass(frozen=True)
class Mutant:
    """One change of one place: the `nth` one that the operator makes in a line with this text, counted in the file."""

    file: str
    text: str
    operator: str
    nth: int
    line: int
    occurrence: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The same after edits of other lines."""
        return self.file, self.text, self.operator, self.nth

    def sound(self) -> str:
        return (ROOT / self.file).read_text()

    def source(self) -> str:
        """The file as the mutant has it; the same text where the operator does not know its way."""
        try:
            return mutate_code(self.sound(), _operator(self.operator), self.occurrence) or self.sound()
        except AttributeError:  # the exception's replacer at a name with a dot
            return self.sound()

    def change(self) -> str:
        """The text that stands in the place of the line's; empty if the line is gone."""
        sound, mutant = self.sound().splitlines(), self.source().splitlines()
        first = next(i for i, (old, new) in enumerate(zip(sound, [*mutant, ""], strict=False)) if old != new)
        same = len(sound) - max(first, self.line - 1) - 1  # lines behind the change
        return "\n".join(line.strip() for line in mutant[first : len(mutant) - same])


def drawn(number: int, seed: int) -> list[Mutant]:
    """The sample."""
    mutants = {name: list[Mutant]() for name in PACKAGES}
    size = dict.fromkeys(PACKAGES, 0)
    for file in files():
        size[package_of(file)] += len((ROOT / file).read_text().splitlines())
        mutants[package_of(file)] += all_of(file)
    return [
        mutant
        for name, share in shares(size, number).items()
        for mutant in sorted(_sample(mutants[name], share, seed), key=lambda mutant: (mutant.file, mutant.line))
    ]


def _sample(mutants: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """Lines in the order of their hashes, of each the first of its mutants that is not left out."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        lines.setdefault((mutant.file, mutant.line), []).append(mutant)
    found: list[Mutant] = []
    same: Counter[tuple[str, str]] = Counter()  # lines of one text in one file, in their order
    hashes = {}
    for place, there in sorted(lines.items()):
        text = there[0].text
        hashes[place] = _hash(seed, place[0], text, same[place[0], text])
        same[place[0], text] += 1
    for there in sorted(lines.values(), key=lambda there: hashes[there[0].file, there[0].line]):
        if len(found) == number:
            break
        order = sorted(there, key=lambda mutant: _hash(seed, *mutant.key))
        found += islice((mutant for mutant in order if not is_left_out(mutant.sound(), mutant.source())), 1)
    return found


def _hash(seed: int, *words: object) -> bytes:
    return hashlib.sha256(repr((seed, *words)).encode()).digest()


def all_of(file: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    kinds: dict[str, list[Any]] = {}
    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        if name == "core/NoOp" or get_operator(name).arguments():
            continue
        kind = name.removeprefix("core/").partition("_")[0]
        if kind not in kinds:
            known = LOOKED_AT.get(kind)
            kinds[kind] = [node for node in nodes if (node.type in known if known else node.type not in OVERLOOKED)]
        counts: dict[str, int] = {}
        places = (start for node in kinds[kind] for start, _ in _operator(name).mutation_positions(node))
        for occurrence, (line, _) in enumerate(places):
            text = lines[line - 1].strip()
            counts[text] = counts.get(text, -1) + 1
            yield Mutant(file, text, name.removeprefix("core/"), counts[text], line, occurrence)


@cache
def _operator(name: str) -> Operator:
    return get_operator(name if "/" in name else f"core/{name}")()
