"""Catalog entries as the JSON texts that journals keep."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from lora_serve.adapters.catalog.entry import Canary, CatalogEntry, Route, VersionEntry

_log = logging.getLogger(__name__)


def document_of(entry: CatalogEntry) -> str:
    """The entry as text."""
    fields = asdict(entry)
    if not entry.shared_with:  # servers of a version that knows no sharing read it too
        del fields["shared_with"]
    return json.dumps(fields, separators=(",", ":"))


def entry_of(text: str) -> CatalogEntry | None:
    """The entry of a text; None, and a line in the log, for one that nobody of us has written."""
    try:
        return _entry(json.loads(text))
    except (ValueError, TypeError, KeyError, StopIteration) as error:
        _log.error("a record of the catalog cannot be read and is left out: %r", error)
        return None


def _entry(document: dict[str, Any]) -> CatalogEntry:
    fields = dict(document)
    route = dict(fields.pop("route"))
    shared_with = fields.pop("shared_with", ())
    if not isinstance(shared_with, list | tuple):
        raise TypeError("`shared_with` is no list")
    canary = route["canary"]
    versions = tuple(VersionEntry(**version) for version in fields.pop("versions"))
    entry = CatalogEntry(
        **fields,
        shared_with=tuple(map(str, shared_with)),
        route=Route(int(route["version"]), canary and Canary(**canary), tuple(map(int, route["history"]))),
        versions=versions,
    )
    # A route that leads nowhere raises StopIteration.
    assert all((entry.routed, *map(entry.version, entry.history)))
    return entry
