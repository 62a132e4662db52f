"""How a caller's limits per minute stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Unit = Literal["requests", "tokens", "registrations", "acts"]


@dataclass(frozen=True, slots=True)
class Standing:
    """One limit at one moment."""

    limit: int
    remaining: int
    reset: float  # seconds until nothing of it is used


Standings = Mapping[Unit, Standing]
