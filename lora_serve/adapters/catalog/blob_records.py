"""What lies beside a blob for each id that names it: all that the catalog said of the id, and when.

So a catalog can be made again from the blobs (rebuilding.py), and a blob tells whether a catalog can know of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.documents import document_of, entry_of
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Position

FORMAT = 1


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """An id as it was at `position` of a catalog; `aliases`: those that lead to it (name -> target)."""

    entry: CatalogEntry
    aliases: Mapping[str, str]
    position: Position
    time: float  # Unix seconds when it was written
    epochs: tuple[str, ...] = ()  # that its catalog had gone through by then

    def is_current(self, entry: CatalogEntry, aliases: Mapping[str, str], epoch: str) -> bool:
        """Whether it says of the id what this catalog does."""
        return self.entry == entry and self.aliases == aliases and self.position.epoch == epoch


def key_of(name: str) -> str:
    """An id's key beside a blob: of a length that every store takes."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def text_of(record: BlobRecord) -> str:
    """The record as a store keeps it."""
    position = record.position
    return json.dumps(
        {
            "format": FORMAT,
            "epoch": position.epoch,
            "generation": position.generation,
            "time": record.time,
            "epochs": list(record.epochs),
            "entry": json.loads(document_of(record.entry)),
            "aliases": dict(record.aliases),
        },
        separators=(",", ":"),
    )


def record_of(text: str) -> BlobRecord | None:
    """The record of a text; None for one that nobody of us has written, or that is not whole."""
    try:
        fields = json.loads(text)
        position, time = Position(str(fields["epoch"]), int(fields["generation"])), float(fields["time"])
        aliases = {str(name): str(target) for name, target in fields["aliases"].items()}
        epochs = tuple(map(str, fields.get("epochs", ())))
        if fields["format"] != FORMAT or not math.isfinite(time):
            return None
        entry = entry_of(json.dumps(fields["entry"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return None if entry is None else BlobRecord(entry, aliases, position, time, epochs)
