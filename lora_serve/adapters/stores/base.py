"""The seam between the registry, the loader and whatever keeps adapter files."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from lora_serve.core.stats import TierStats


class AdapterStore(Protocol):
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

    def sweep(self, named: frozenset[str]) -> None:
        """At start: remove what a crash left on this machine and what is not in `named`, set broken blobs aside."""


class StoreFigures(Protocol):
    """What the web asks of a store; never a round trip to another machine."""

    def tiers(self) -> dict[str, TierStats]:
        """Figures by tier. May wait for a thread that writes. Raises AdapterUnavailableError."""

    def places_of(self, digest: str) -> tuple[str, ...]:
        """The tiers that have a registered adapter, the far one first."""
