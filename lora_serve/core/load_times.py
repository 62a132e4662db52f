"""Where the time of a load went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """One load of an adapter's weights, in seconds, waiting for a thread not counted."""

    tier: str  # where the bytes came from: "disk", "redis", ...; "none": they were made here
    fetch: float = 0.0  # files onto this machine, bytes into memory
    verify: float = 0.0  # their digests
    parse: float = 0.0  # to tensors, checked against the base
    fold: float = 0.0  # the base's part worked in
    copy: float = 0.0  # into a device slot, on the engine's thread
