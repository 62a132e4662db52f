"""The record beside a blob of each id that names it: the catalog's entry of the id, with the time.

From these records a lost catalog is rebuilt (maintenance/rebuild.py), and they tell whether a catalog knew the blob.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.documents import document_of, entry_of
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.stores.base import RecordStore

FORMAT = 1


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """An id as it was at `position` of a catalog; `aliases` lead to it (name -> target)."""

    entry: CatalogEntry
    aliases: Mapping[str, str]
    position: Position
    time: float  # Unix seconds when it was written
    epochs: tuple[str, ...] = ()  # all that its catalog had had by then

    def is_current(self, entry: CatalogEntry, aliases: Mapping[str, str], epoch: str) -> bool:
        """True if the record agrees with a catalog of this epoch."""
        return self.entry == entry and self.aliases == aliases and self.position.epoch == epoch


def key_of(name: str) -> str:
    """The key of an id's record: of a length that every store takes."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def text_of(record: BlobRecord) -> str:
    """The record as text."""
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
    """The record of a text; None for one that no server wrote, or that is incomplete."""
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


def digests_of(store: RecordStore, names: Collection[str], digests: Collection[str]) -> frozenset[str]:
    """Those of `digests` beside which one of these ids has a record. Raises AdapterUnavailableError."""
    keys = set(map(key_of, names))
    return frozenset(d for d, texts in store.records(digests).items() if keys & texts.keys()) if keys else frozenset()


def read_records(store: RecordStore, digests: Collection[str]) -> list[BlobRecord]:
    """All readable records beside these blobs. Raises AdapterUnavailableError."""
    texts = [text for found in store.records(digests).values() for text in found.values()]
    return [record for text in texts if (record := record_of(text)) is not None]
