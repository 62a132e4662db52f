"""The costs of compiling a schema that no limit of `llguidance` bounds.

It follows references by recursion, compares every two patterns of an object's names, takes time with the square of an
object's properties and of a regex's length, time and memory with the smallest number that all `multipleOf` divide, and
time with the length that a text with a pattern may have. All of this is bounded before it sees a schema,
on a thread of the web process (`server/background/tasks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Reversible
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class SchemaPlace:
    """The place of one schema. Its text is the whole pointer."""

    around: SchemaPlace | None  # of the schema that it stands in
    part: str  # of the pointer, from the schema around it on
    depth: int  # schemas around it

    def __str__(self) -> str:
        return "".join(reversed([place.part for place in self.upwards()]))

    def upwards(self) -> Iterator[SchemaPlace]:
        """The place itself and those around it."""
        place: SchemaPlace | None = self
        while place is not None:
            yield place
            place = place.around


class SchemaPlaces:
    """The places of all schemas in one."""

    def __init__(self) -> None:
        self.root = SchemaPlace(None, "#", 0)
        self._below: dict[tuple[SchemaPlace, str], SchemaPlace] = {}

    def add(self, around: SchemaPlace, part: str) -> SchemaPlace:
        """A new place. `part`: of the pointer; a keyword, perhaps with a name or a number behind it."""
        place = SchemaPlace(around, part, around.depth + 1)
        self._below[around, part] = place
        return place

    def below_root(self) -> Reversible[SchemaPlace]:
        """All places but the root; each comes behind that around it."""
        return self._below.values()

    def find(self, pointer: str) -> SchemaPlace | None:
        """The place that a pointer from the root leads to; None: no schema stands there."""
        place, part = self.root, ""
        for name in pointer.split("/")[1:]:
            if part.count("/") == 2:  # longer ones would be looked at again with each name
                return None
            part += f"/{name}"
            if (below := self._below.get((place, part))) is not None:
                place, part = below, ""
        return None if part else place


MAX_CHAIN = 400  # schemas inside one another, along references: a stack of 8 MB overflows at some 1800
MAX_PATTERN_PAIRS = 3000
MAX_PROPERTIES = 2000
MAX_MULTIPLE = 20_000  # 0.3 s; 100 000 take 1.5 s, 1 000 000 gigabytes
MAX_LENGTHS = 131_072  # of texts with patterns: 2 s with some; 262 144 take 5 s and 0.3 GB
_LENGTHS = ("minLength", "maxLength")
_JOINING = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "propertyNames"))  # bring parts of schemas together


@dataclass(slots=True)
class SchemaCost:
    """Counts of one schema, filled in while it is walked through."""

    num_pattern_pairs: int = 0
    squared_properties: int = 0
    squared_regexes: int = 0
    longest: int = 0  # length that a text may have
    lengths_beside_patterns: int = 0
    num_patterns: int = 0
    has_joins: bool = False
    multiples: set[Fraction] = field(default_factory=set)  # of all `multipleOf`
    places: SchemaPlaces = field(default_factory=SchemaPlaces)
    refs: list[tuple[SchemaPlace, SchemaPlace]] = field(default_factory=list)  # place, and the place that it refers to

    def add(self, schema: Mapping[str, Any]) -> None:
        """Count one schema, without those inside it."""
        names, patterns = schema.get("properties"), schema.get("patternProperties")
        if isinstance(names, dict):
            self.squared_properties += len(names) ** 2
        if isinstance(patterns, dict):
            self.num_pattern_pairs += len(patterns) ** 2 // 2
            self.squared_regexes += sum(len(pattern) ** 2 for pattern in patterns)
        if isinstance(pattern := schema.get("pattern"), str):
            self.squared_regexes += len(pattern) ** 2
        self.has_joins |= not _JOINING.isdisjoint(schema)
        self._add_lengths(schema)
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and 0 < multiple < math.inf:
            self.multiples.add(Fraction(repr(multiple)))

    def _add_lengths(self, schema: Mapping[str, Any]) -> None:
        given: list[Any] = [schema.get(name) for name in _LENGTHS]
        longest = max((int(one) for one in given if _is_length(one)), default=0)
        patterns = schema.get("patternProperties")
        self.longest = max(self.longest, longest)
        self.num_patterns += ("pattern" in schema) + (len(patterns) if isinstance(patterns, dict) else 0)
        self.lengths_beside_patterns += longest if "pattern" in schema else 0

    def problem(self, max_regex: int) -> str:
        """The reason why the schema is too costly; empty if it is not."""
        if self.squared_properties > MAX_PROPERTIES**2:
            return f"more than {MAX_PROPERTIES} properties of an object"
        if self.num_pattern_pairs > MAX_PATTERN_PAIRS:
            return "too many patternProperties of an object"
        if self.common_multiple() > MAX_MULTIPLE:
            return f"numbers of `multipleOf` whose smallest common multiple, without its point, is above {MAX_MULTIPLE}"
        if self.squared_regexes > max_regex**2:
            return f"regexes of more than {max_regex} characters (--max-regex-size)"
        if (self.num_patterns * self.longest if self.has_joins else self.lengths_beside_patterns) > MAX_LENGTHS:
            return f"lengths of texts with patterns that are above {MAX_LENGTHS} together: leave `maxLength` out"
        if self.longest_chain() > MAX_CHAIN:
            return f"references to schemas that refer to others: more than {MAX_CHAIN} inside one another"
        return ""

    def common_multiple(self) -> int:
        """The smallest common multiple of all `multipleOf`, counted in units of their last decimal place; one schema
        may come to stand for several of them.
        """
        scale = math.lcm(*(multiple.denominator for multiple in self.multiples))
        found = 1
        for multiple in self.multiples:
            found = math.lcm(found, int(multiple * scale))
            if found > MAX_MULTIPLE:
                break
        return found

    def longest_chain(self) -> int:
        """No less than the number of schemas that a walk along the references can be inside of at once."""
        deepest = {self.places.root: 0}  # by place: the depth of the deepest schema in it
        deepest |= {place: place.depth for place in self.places.below_root()}
        for place in reversed(self.places.below_root()):
            assert place.around is not None, "only the root has none"
            deepest[place.around] = max(deepest[place.around], deepest[place])
        targets = {target for _, target in self.refs} | {self.places.root}
        height = {target: deepest[target] - target.depth + 1 for target in targets}
        uses: dict[SchemaPlace, set[SchemaPlace]] = {target: set() for target in targets}
        for place, target in self.refs:
            for owner in targets.intersection(place.upwards()):
                uses[owner].add(target)
        return _longest_path(height, uses)


def _is_length(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _longest_path(weights: Mapping[SchemaPlace, int], uses: Mapping[SchemaPlace, set[SchemaPlace]]) -> int:
    """The weight of the heaviest path; all that refer to one another in a circle count together."""
    best: dict[SchemaPlace, int] = {}
    longest = 0
    for circle in _circles(uses):  # what others refer to comes before them
        members = set(circle)
        below = max((best[user] for name in circle for user in uses[name] if user not in members), default=0)
        total = sum(weights[name] for name in circle) + below
        best.update(dict.fromkeys(circle, total))
        longest = max(longest, total)
    return longest


def _circles(uses: Mapping[SchemaPlace, set[SchemaPlace]]) -> Iterator[list[SchemaPlace]]:
    """Strongly connected components, each after those that it refers to (Tarjan, 1972), without recursion."""
    index: dict[SchemaPlace, int] = {}
    low: dict[SchemaPlace, int] = {}
    stack: list[SchemaPlace] = []
    on_stack: set[SchemaPlace] = set()
    for start in uses:
        if start in index:
            continue
        work = [(start, iter(uses[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            name, left = work[-1]
            following = next(left, None)
            if following is not None:
                if following not in index:
                    index[following] = low[following] = len(index)
                    stack.append(following)
                    on_stack.add(following)
                    work.append((following, iter(uses[following])))
                elif following in on_stack:
                    low[name] = min(low[name], index[following])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[name])
            if low[name] == index[name]:
                at = stack.index(name)
                circle = stack[at:]
                del stack[at:]
                on_stack.difference_update(circle)
                yield circle
