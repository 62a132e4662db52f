"""JSON pointers to the schemas inside one, kept in parts: whole ones would repeat a long name for all below it."""

from __future__ import annotations

from collections.abc import Iterator, Reversible
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place of one schema. Its text is the whole pointer."""

    around: Place | None  # of the schema that it stands in
    part: str  # of the pointer, from the schema around it on
    depth: int  # schemas around it

    def __str__(self) -> str:
        return "".join(reversed([place.part for place in self.upwards()]))

    def upwards(self) -> Iterator[Place]:
        """The place itself and those around it."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.around


class Places:
    """The places of all schemas in one."""

    def __init__(self) -> None:
        self.root = Place(None, "#", 0)
        self._below: dict[tuple[Place, str], Place] = {}

    def add(self, around: Place, part: str) -> Place:
        """A new place. `part`: of the pointer; a keyword, perhaps with a name or a number behind it."""
        place = Place(around, part, around.depth + 1)
        self._below[around, part] = place
        return place

    def below_root(self) -> Reversible[Place]:
        """All places but the root; each comes behind that around it."""
        return self._below.values()

    def find(self, pointer: str) -> Place | None:
        """The place that a pointer from the root leads to; None: no schema stands there."""
        place, part = self.root, ""
        for name in pointer.split("/")[1:]:
            if part.count("/") == 2:  # longer ones would be looked at again with each name
                return None
            part += f"/{name}"
            if (below := self._below.get((place, part))) is not None:
                place, part = below, ""
        return None if part else place
