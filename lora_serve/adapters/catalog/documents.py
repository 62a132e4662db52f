"""Writes catalog entries as the JSON texts that journals keep, and reads them."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import asdict, replace
from typing import Any

from lora_serve.adapters.catalog.entry import Canary, CatalogEntry, Route, VersionEntry, check_tenant
from lora_serve.adapters.catalog.noted_template import KEY, interned
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import RequestError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_log = logging.getLogger(__name__)


def document_of(entry: CatalogEntry) -> str:
    """The entry as text."""
    fields = asdict(entry)
    if not entry.shared_with:  # servers of versions before sharing read it too
        del fields["shared_with"]
    return json.dumps(fields, separators=(",", ":"))


def entry_of(text: str) -> CatalogEntry | None:
    """The entry of a text; None, and a line in the log, for a text that no server can have written."""
    try:
        return _entry(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError, RequestError) as error:
        _log.error("a record of the catalog cannot be read and is left out: %r", error)
        return None


def _entry(document: dict[str, Any]) -> CatalogEntry:
    fields = dict(document)
    route = dict(fields.pop("route"))
    shared_with = fields.pop("shared_with", ())
    if not isinstance(shared_with, list | tuple):
        raise TypeError("`shared_with` is no list")
    canary = route["canary"]
    versions = tuple(_version(version) for version in fields.pop("versions"))
    entry = CatalogEntry(
        **fields,
        shared_with=tuple(map(str, shared_with)),
        route=Route(int(route["version"]), canary and Canary(**canary), tuple(map(int, route["history"]))),
        versions=versions,
    )
    _check(entry)
    return entry


def _version(document: dict[str, Any]) -> VersionEntry:
    version = VersionEntry(**document)
    if KEY not in version.summary:
        return version
    return replace(version, summary={**version.summary, KEY: interned(version.summary[KEY])})


def _check(entry: CatalogEntry) -> None:
    """Whoever can write into the journal must not be able to name a file of this machine. Raises also StopIteration."""
    check_adapter_id(entry.name)
    check_tenant(entry.tenant)
    for version in entry.versions:
        if not _DIGEST.match(version.digest):
            raise ValueError(f"{version.digest[:80]!r} is not a digest")
    _check_types(entry)
    if not all((entry.routed, *map(entry.version, entry.history))):
        raise ValueError("a route leads nowhere")


def _check_types(entry: CatalogEntry) -> None:
    """One malformed record must not break the listing of all."""
    versions, canaries = entry.versions, [entry.route.canary] if entry.route.canary else []
    traits = [version.traits for version in versions]
    tokens = [token for one in traits for token in one.added_tokens]
    typed: dict[type, list[Any]] = {
        str: [entry.tenant, *(v.source for v in versions), *(t.base for t in traits), *(t.content for t in tokens)],
        bool: [entry.pinned, *(one.is_additive for one in traits)],
        dict: [entry.metadata, *(version.summary.get("converted_from", {}) for version in versions)],
    }
    if not all(isinstance(value, form) for form, values in typed.items() for value in values):
        raise TypeError("a value is of another type than it must be")
    counts = [entry.last_version, *(canary.version for canary in canaries), *(token.id for token in tokens)]
    counts += [number for version in versions for number in (version.version, version.rank, version.num_bytes)]
    counts += [number for one in traits for number in (one.vocab_size, one.num_labels)]
    counts += [number for one in traits for number in (*one.invocation_tokens, *one.eos_token_ids)]
    if not all(type(number) is int and 0 <= number < 2**62 for number in counts):
        raise ValueError("a number is none")
    amounts = [entry.created, *(version.created for version in versions), *(canary.percent for canary in canaries)]
    if not all(math.isfinite(amount) for amount in amounts):
        raise ValueError("a number is not finite")
