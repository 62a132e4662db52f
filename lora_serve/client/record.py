"""The base of everything that crosses between processes: a frozen record, tagged with its class's name."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encoded as [tag, field, ...]; the types of its fields are checked when it is decoded."""
