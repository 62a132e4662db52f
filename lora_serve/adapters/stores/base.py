"""The seam between the registry, the loader and the stores of adapter files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lora_serve.core.figures import EvictionReason, TierStats

Records = Mapping[str, str]  # texts by key
MayDelete = Callable[[str, Records, Records], bool]  # digest, its records, and the tombstones of removed ones


class RecordStore(Protocol):
    """Durable texts beside blobs, each under a key of 32 hex digits, from which the catalog can be rebuilt.

    A record is no part of a digest and goes with its blob. Every method raises AdapterUnavailableError.
    """

    def records(self, digests: Collection[str]) -> dict[str, dict[str, str]]:
        """The records of each blob that is here; an unreadable record is an empty text."""

    def staging(self, records: Mapping[str, Records]) -> AbstractContextManager[Callable[[], None]]:
        """Write these records, by digest, aside; the yielded function puts them in their place.

        Records of blobs that are not here are left out.
        """

    def remove_record(self, digest: str, key: str, tombstone: bool) -> None:
        """Remove a record, also on a full disk. `tombstone`: leave a mark that there was one."""


class AdapterStore(RecordStore, Protocol):
    """Files of adapter versions by digest. Safe to call from several threads; a half-written blob is never seen.

    Every method raises AdapterUnavailableError when the store cannot be reached or written.
    """

    def put(self, digest: str, folder: Path) -> None:
        """Keep the folder's files (`content_names`) durably; a no-op if they are there already and sound.

        `folder` must be private to the caller, hold what `digest` names, and never be written to again:
        a store may link its files instead of copying them.
        """

    def open(self, digest: str) -> AbstractContextManager[Path]:
        """A folder with those files, to be read only, valid until the context ends.

        The content is not promised to be sound: its loader checks the digest. Raises
        AdapterUnavailableError if the store does not have it.
        """

    def has(self, digest: str) -> bool:
        """True if the store has the blob."""

    def delete(self, digest: str) -> None:
        """Delete the blob, if the store has it."""

    def digests(self) -> frozenset[str]:
        """The digests of all blobs in the store."""

    def release(self, digest: str) -> None:
        """Drop this machine's own copy beside one that other replicas may need, if there is such a copy."""


class StoreFigures(Protocol):
    """The figures that the web asks of a store; never a round trip to another machine."""

    def tiers(self) -> dict[str, TierStats]:
        """Figures by tier. May wait for a thread that writes. Raises AdapterUnavailableError."""

    def places_of(self, digest: str) -> tuple[str, ...]:
        """The tiers that have a registered adapter, the far one first."""


@dataclass(slots=True)
class TierCounts:
    """Running counts; `frozen` gives a snapshot."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_seconds: float = 0.0  # summed
    evictions: Counter[EvictionReason] = field(default_factory=Counter)

    def loaded(self, seconds: float) -> None:
        """Count a load into the tier."""
        self.loads += 1
        self.load_seconds += seconds

    def frozen(self, num_items: int | None, num_bytes: int | None, budget: int | None) -> TierStats:
        """A snapshot with what is resident now (None: unknown); `budget` in bytes, None: no limit."""
        return TierStats(
            self.hits,
            self.misses,
            self.loads,
            self.evictions.total(),
            self.load_seconds,
            num_bytes,
            budget or 0,
            num_items,
            dict(self.evictions),
        )
