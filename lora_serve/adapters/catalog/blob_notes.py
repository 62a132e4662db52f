"""Notes about blobs that a store may have though no version names them: who is writing or still using them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

LEASE = 3600.0  # seconds after which a hold of a replica that is gone counts no more


@dataclass(frozen=True, slots=True)
class BlobNote:
    """The holders of one blob, and whether somebody is deleting it."""

    holders: Mapping[str, float]  # "<replica>:<number>" -> Unix seconds
    condemned: bool = False

    def held_by(self, holder: str, now: float) -> BlobNote:
        return replace(self, holders={**self.holders, holder: now})

    def without(self, holder: str) -> BlobNote:
        return replace(self, holders={other: time for other, time in self.holders.items() if other != holder})

    def is_held(self, now: float, but_for: str = "") -> bool:
        """Whether anybody else holds it, leases that ran out not counted."""
        return any(other != but_for and now - time < LEASE for other, time in self.holders.items())

    @property
    def text(self) -> str:
        return json.dumps({"holders": dict(self.holders), "condemned": self.condemned})


def note_of(text: str | None) -> BlobNote:
    """The note of a text that a journal keeps; None: nobody holds it."""
    if text is None:
        return BlobNote({})
    try:
        fields = json.loads(text)
        return BlobNote({str(key): float(time) for key, time in fields["holders"].items()}, bool(fields["condemned"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return BlobNote({})
