"""Notes about blobs that a store may have though no version names them: who is writing or still using them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

LEASE_SECONDS = 3600.0  # seconds after which a hold of a replica that is gone counts no more


@dataclass(frozen=True, slots=True)
class BlobLeaseRecord:
    """The holders of one blob, and whether somebody is deleting it."""

    holders: Mapping[str, float]  # "<replica>:<number>" -> Unix seconds
    condemned: bool = False

    def with_holder(self, holder: str, now: float) -> BlobLeaseRecord:
        return replace(self, holders={**self.holders, holder: now})

    def without(self, holder: str) -> BlobLeaseRecord:
        return replace(self, holders={other: time for other, time in self.holders.items() if other != holder})

    def is_leased(self, now: float, but_for: str = "") -> bool:
        """Whether anybody else holds it, leases that ran out not counted."""
        return any(other != but_for and now - time < LEASE_SECONDS for other, time in self.holders.items())

    @property
    def text(self) -> str:
        return json.dumps({"holders": dict(self.holders), "condemned": self.condemned})


def lease_record_of(text: str | None) -> BlobLeaseRecord:
    """The note of a text that a journal keeps; None: nobody holds it."""
    if text is None:
        return BlobLeaseRecord({})
    try:
        fields = json.loads(text)
        return BlobLeaseRecord(
            {str(key): float(time) for key, time in fields["holders"].items()}, bool(fields["condemned"])
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return BlobLeaseRecord({})
