"""The registrations under way: how far each has come, for whoever waits for it."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Stage(enum.StrEnum):
    """The steps of a registration, in their order."""

    RECEIVING = "receiving"  # an upload's bytes
    FETCHING = "fetching"  # a source's bytes
    EXAMINING = "examining"  # files, names, shapes and values; before that it waits for its tenant's turn
    PROBING = "probing"  # a forward pass with the adapter; then it is pinned, where that is asked for


@dataclass(slots=True, eq=False)
class Progress:
    """One registration; written by the thread that works on it, read by any."""

    id: str
    scope: str | None  # the tenant that registers; None: somebody who sees all
    stage: Stage
    num_bytes: int = 0  # that came so far
    total_bytes: int | None = None  # None: not known
    started: float = field(default_factory=time.time)  # Unix seconds

    def receive(self, num_bytes: int) -> None:
        """Note how many bytes came in all."""
        self.num_bytes = num_bytes

    def examine(self) -> None:
        """Note that all files are here."""
        self.stage = Stage.EXAMINING

    def probe(self) -> None:
        """Note that the files are found right."""
        self.stage = Stage.PROBING


class Registering:
    """All that are under way; changed on the event loop."""

    def __init__(self) -> None:
        self._all: Counter[Progress] = Counter()  # how many blocks work on each

    @contextmanager
    def listed(self, progress: Progress) -> Iterator[None]:
        """Lists a registration until the block ends, and every other block for it: the request's may end first."""
        self._all[progress] += 1
        try:
            yield
        finally:
            self._all[progress] -= 1
            if not self._all[progress]:
                del self._all[progress]

    def seen_by(self, scope: str | None, since: float = 0.0) -> list[Progress]:
        """Those that a tenant began (None: all), the oldest first. `since`: when the tenant was made, in Unix seconds;
        what began before was begun by another one of that name.
        """
        return [one for one in self._all if scope is None or (one.scope == scope and one.started >= since)]
