"""The seam between the catalog and the place of its records: texts by key, and a count of the commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Position:
    """A moment in the life of a journal."""

    epoch: str = ""  # names the journal; empty: nothing was ever written
    generation: int = 0  # commits made so far
    head: str = ""  # names the last commit, as two branches may have the same count; empty: no name


@dataclass(frozen=True, slots=True)
class Page:
    """Records as they are at `position`; a None text is a deleted record."""

    position: Position
    records: Mapping[str, str | None]
    # Names of the commits that led here, with their generations; negative: commits of a merged branch.
    heads: Mapping[str, int] = field(default_factory=dict)


class Journal(Protocol):
    """Texts by key, changed by one atomic and durable commit at a time.

    Every method raises AdapterUnavailableError when the journal cannot be reached or written.
    """

    def load(self) -> Page:
        """All records."""

    def since(self, position: Position) -> Page | None:
        """Records changed after `position`, perhaps more; None: unknown, so that all must be loaded."""

    def commit(
        self,
        expected: Position,
        changes: Mapping[str, str | None],
        becomes: Position | None = None,
        heads: Mapping[str, int] | None = None,
    ) -> Position | None:
        """Write `changes` durably if the journal is still at `expected`; otherwise write nothing and return None.

        `becomes`: the new position when the journal is filled anew or merges another branch, whose commits are `heads`;
        None: one generation on.
        """

    def wait(self, position: Position, seconds: float) -> None:
        """Return once there may be something after `position`, or after `seconds`."""

    def forget(self) -> None:
        """Erase the remains of deleted records: their names in the list of changes, their old pages.

        Readers that are not at the newest position load all records then.
        """

    def close(self) -> None:
        """Release all resources; may be called twice."""
