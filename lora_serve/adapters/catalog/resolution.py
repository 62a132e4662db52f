"""The answer to a name: one version of one adapter, and how the name came to mean it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry
from lora_serve.core.adapter import AdapterRef


class Selection(enum.StrEnum):
    """How a name came to mean one version."""

    DEFAULT = "default"  # the id's route
    CANARY = "canary"  # the canary of the id's route
    PINNED = "pinned"  # the caller named the version, by number or digest
    ALIAS = "alias"  # the caller named an alias, and the alias names the version


@dataclass(frozen=True, slots=True)
class Resolution:
    """A version, chosen from its entry as it was when the name was looked up."""

    entry: CatalogEntry
    version: VersionEntry
    selection: Selection

    @property
    def ref(self) -> AdapterRef:
        """The reference that travels with requests."""
        return self.entry.ref(self.version)

    @property
    def names_version(self) -> bool:
        """Whether the name means this version whatever the id's route says."""
        return self.selection in (Selection.PINNED, Selection.ALIAS)

    @property
    def previous(self) -> AdapterRef | None:
        """The version that the same name meant before: the default version before its canary, what the route meant
        last before the default version. None: there is none, as for every name that names a version.
        """
        if self.names_version:
            return None
        before = self.entry.default if self.selection is Selection.CANARY else self.entry.previous
        return None if before is None or before.digest == self.version.digest else self.entry.ref(before)
