"""The seam between the catalog and what keeps its records: texts by key, and a count of the changes made to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Position:
    """A moment in a journal's life."""

    epoch: str = ""  # names the journal itself; empty: nothing was ever written
    generation: int = 0  # commits made so far
    head: str = ""  # names the last of them, as two branches may count alike; empty: it has no name


@dataclass(frozen=True, slots=True)
class Page:
    """Records as they are at `position`; a None text is a record that is gone."""

    position: Position
    records: Mapping[str, str | None]
    # Names of commits that led here, with their generations; negative: of a branch that was taken in.
    heads: Mapping[str, int] = field(default_factory=dict)


class Journal(Protocol):
    """Texts by key, changed by one atomic and durable commit at a time.

    Every method raises AdapterUnavailableError when the journal cannot be reached or written.
    """

    def load(self) -> Page:
        """All records."""

    def since(self, position: Position) -> Page | None:
        """Records changed after `position`, perhaps some that were not; None: that cannot be told, load all."""

    def commit(
        self,
        expected: Position,
        changes: Mapping[str, str | None],
        becomes: Position | None = None,
        heads: Mapping[str, int] | None = None,
    ) -> Position | None:
        """Write `changes` if the journal is still at `expected`; None, and nothing is written, if it is not.

        Durable on return. `becomes`: where it then is, when it is filled anew or takes in another branch, and `heads`
        that branch's commits; None: one generation on.
        """

    def wait(self, position: Position, seconds: float) -> None:
        """Return once there may be something after `position`, or after so many seconds."""

    def forget(self) -> None:
        """Drop what else is kept of records that are gone: their names in the list of changes, their old pages.

        Whoever is not at the newest position loads all then.
        """

    def close(self) -> None:
        """Give back what it holds; it may be called twice."""
