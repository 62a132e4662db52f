"""The seam between the registry, the loader and whatever keeps adapter files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from lora_serve.core.stats import TierStats

Records = Mapping[str, str]  # texts by key
MayDelete = Callable[[str, Records, Records], bool]  # digest, its records, and tombstones of those that were taken away


class RecordStore(Protocol):
    """Short texts beside blobs, each under a key of 32 hex digits: the catalog's own words, so that they outlive it.

    They are durable, no part of a digest, and go with their blob. Every method raises AdapterUnavailableError.
    """

    def records(self, digests: Collection[str]) -> dict[str, dict[str, str]]:
        """By digest, of those that are here: its records. What cannot be read as text is an empty one."""

    def staging(self, records: Mapping[str, Records]) -> AbstractContextManager[Callable[[], None]]:
        """Make sure that there is room for these records, by digest; what is given puts them in their place.

        Of a blob that is not here they are left out.
        """

    def remove_record(self, digest: str, key: str, tombstone: bool) -> None:
        """A record counts no more, though a disk may be full. `tombstone`: that there was one stays known."""


class AdapterStore(RecordStore, Protocol):
    """Files of adapter versions by digest. Safe to call from several threads; a half-written blob is never seen.

    Every method raises AdapterUnavailableError when the store cannot be reached or written.
    """

    def put(self, digest: str, folder: Path) -> None:
        """Keep the folder's files (`digest.content_names`) durably; a no-op if they are there already and sound.

        `folder` must be private to the caller, hold what `digest` names, and never be written to again:
        a store may link its files instead of copying them.
        """

    def open(self, digest: str) -> AbstractContextManager[Path]:
        """A folder with those files, to be read only, valid until the context ends.

        The content is not promised to be sound: whoever loads it checks the digest. Raises
        AdapterUnavailableError if the store does not have it.
        """

    def has(self, digest: str) -> bool:
        """Whether it is here."""

    def delete(self, digest: str) -> None:
        """Forget it; a no-op if it is not here."""

    def digests(self) -> frozenset[str]:
        """Everything that is here."""

    def release(self, digest: str) -> None:
        """Drop a copy that is this machine's own beside one that others may need; a no-op without such a copy."""

    def sweep(self, named: frozenset[str], may_delete: MayDelete, days: float = 0) -> int:
        """At start: remove what a crash left on this machine, set broken blobs aside.

        Of what is not in `named` that is removed which the catalog `knows`; the rest is kept aside for so many days
        (0: for ever). How many are kept aside now.
        """


class StoreFigures(Protocol):
    """What the web asks of a store; never a round trip to another machine."""

    def tiers(self) -> dict[str, TierStats]:
        """Figures by tier. May wait for a thread that writes. Raises AdapterUnavailableError."""

    def places_of(self, digest: str) -> tuple[str, ...]:
        """The tiers that have a registered adapter, the far one first."""
