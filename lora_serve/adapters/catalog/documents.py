"""Writes catalog entries as the JSON texts that journals keep, and reads them."""

from __future__ import annotations

import json
import logging

import msgspec
from msgspec.structs import replace

from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry, check_tenant
from lora_serve.adapters.catalog.noted_template import KEY, interned
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import RequestError

_decoder = msgspec.json.Decoder(CatalogEntry)
_log = logging.getLogger(__name__)


def document_of(entry: CatalogEntry) -> str:
    """The entry as text."""
    fields = msgspec.to_builtins(replace(entry, versions=tuple(version.read for version in entry.versions)))
    if not entry.shared_with:  # servers of versions before sharing read it too
        del fields["shared_with"]
    return json.dumps(fields, separators=(",", ":"))


def entry_of(text: str) -> CatalogEntry | None:
    """The entry of a text; None, and a line in the log, for a text that no server can have written."""
    try:
        try:
            entry = _decoder.decode(text)
        except msgspec.MsgspecError:  # texts of metadata may hold halves of a character, which JSON allows
            fields = json.loads(text)
            for version in fields.get("versions", ()):
                version["summary"] = msgspec.Raw(json.dumps(version["summary"]).encode())
            entry = msgspec.convert(fields, CatalogEntry)
        return _checked(entry)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RequestError) as error:
        _log.error("a record of the catalog cannot be read and is left out: %r", error)
        return None


def _checked(entry: CatalogEntry) -> CatalogEntry:
    """Whoever can write into the journal must not be able to name a file of this machine, and one malformed record
    must not break the listing of all.
    """
    check_adapter_id(entry.name)
    check_tenant(entry.tenant)
    numbers, is_shared = set[int](), False
    for version in entry.versions:
        numbers.add(version.version)
        is_shared = version.facts.chat_template is not None or is_shared  # raises for facts of another form
    route = entry.route
    if not numbers.issuperset((route.version, *route.history, *((route.canary.version,) if route.canary else ()))):
        raise ValueError("a route leads nowhere")
    return replace(entry, versions=tuple(map(_with_shared_texts, entry.versions))) if is_shared else entry


def _with_shared_texts(version: VersionEntry) -> VersionEntry:
    note = version.facts.chat_template
    return version if note is None else replace(version, noted={**version.summary, KEY: interned(note)})
