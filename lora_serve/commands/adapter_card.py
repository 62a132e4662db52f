"""An adapter's card: as tables for people, and compared with what --wait waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from rich.table import Table

from lora_serve.commands.output import Columns, bytes_text, facts_table, plain, table_of, time_text, yes_or_no
from lora_serve.commands.verb import Condition, Document, Given
from lora_serve.core.tenant import EVERYBODY

# Fields of the first table that are shown under another name; all others keep the server's name.
_SHOWN = {"id", "object", "tenant", "pinned", "created", "version", "route", "aliases", "digest", "bytes", "state",
          "tiers", "targets", "kinds", "metadata", "versions", "warnings", "shared_with",
          "defaults", "replicas"}  # fmt: skip
NUMBERS = ("rank", "size", "hits", "misses")


def route_text(card: dict[str, Any]) -> str:
    """3, or 3 (4: 10 %) while a canary takes a share."""
    canary = (card.get("route") or {}).get("canary")
    text = str(card["version"])
    return f"{text} ({canary['version']}: {canary['percent']:g} %)" if canary else text


LIST_COLUMNS: Columns = {
    "id": itemgetter("id"),
    "version": route_text,
    "rank": itemgetter("rank"),
    "size": lambda card: bytes_text(card["bytes"]),
    "state": itemgetter("state"),
    "tiers": lambda card: ", ".join(card["tiers"]),
    "hits": itemgetter("hits"),
    "misses": itemgetter("misses"),
    "pinned": lambda card: "yes" if card["pinned"] else "",
}
_VERSION_COLUMNS: Columns = {
    "version": itemgetter("version"),
    "created": lambda version: time_text(version["created"]),
    **{name: LIST_COLUMNS[name] for name in ("rank", "size", "state", "tiers")},
    "source": itemgetter("source"),
    "digest": itemgetter("digest"),
}


def card_tables(card: Document, given: Given) -> tuple[Table, Table]:
    """The adapter's facts, then a line per version."""
    versions = table_of(card["versions"], _VERSION_COLUMNS, NUMBERS, overflow="fold")
    return facts_table(_facts(card)), versions


def show_sharing(card: Document, given: Given) -> str:
    names = card["shared_with"]
    who = "all tenants" if names == [EVERYBODY] else ", ".join(names) or "nobody"
    return f"{card['id']} is shared with {who}"


def show_routing(card: Document, given: Given) -> str:
    return f"{card['id']} means version {route_text(card)}"


def show_tiers(card: Document, given: Given) -> str:
    pinned = ", pinned" if card["pinned"] else ""
    return f"{card['id']}@{card['version']}: on {', '.join(card['tiers'])}{pinned}"


def metadata_text(card: dict[str, Any]) -> str:
    """The metadata, a line each, and the defaults that requests have of it."""
    lines = [f"  {plain(name)}: {json.dumps(value)}" for name, value in card["metadata"].items()]
    return "\n".join(["metadata:" if lines else "metadata: none", *lines, defaults_text(card)])


def defaults_text(card: dict[str, Any]) -> str:
    """The defaults in force, a line each."""
    lines = [f"  {plain(name)}: {json.dumps(value)}" for name, value in (card.get("defaults") or {}).items()]
    return "\n".join(["defaults of requests:" if lines else "defaults of requests: none", *lines])


def _facts(card: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "id", card["id"]
    yield "tenant", card["tenant"]
    yield "version", route_text(card)
    if history := (card.get("route") or {}).get("history"):
        yield "versions before", ", ".join(map(str, history))
    if card.get("aliases"):
        yield "aliases", ", ".join(card["aliases"])
    yield "digest", card["digest"]
    if card.get("shared_with"):
        yield "shared with", "all" if card["shared_with"] == ["*"] else ", ".join(card["shared_with"])
    yield "size", bytes_text(card["bytes"])
    yield "state", card["state"]
    yield "tiers", ", ".join(card["tiers"])
    if (replicas := card.get("replicas")) is not None:
        yield "replicas", ", ".join(f"{place['replica']} ({_held(place)})" for place in replicas) or "-"
    yield "pinned", yes_or_no(card["pinned"])
    yield "created", time_text(card["created"])
    yield "targets", ", ".join(card["targets"])
    yield "kinds", ", ".join(card["kinds"]) or "plain LoRA"
    if card["metadata"]:
        yield "metadata", json.dumps(card["metadata"])
    if card.get("defaults"):
        yield "defaults", json.dumps(card["defaults"])
    for name, value in card.items():
        if name not in _SHOWN:
            yield name.replace("_", " "), _value(value)
    for warning in card["warnings"]:
        yield "warning", warning


def _held(place: dict[str, Any]) -> str:
    return ", ".join([*place["tiers"], *["loading"] * place["is_loading"]])


def _value(value: Any, name: str = "") -> str:
    """{"fetch": 1.5, "copy": {"host": 2}} -> fetch 1.5, copy (host 2)"""
    if value is None or value in ([], {}):
        return "-"
    if name == "last_used":
        return time_text(value)
    if isinstance(value, dict):
        parts = (f"{key} ({_value(item)})" if isinstance(item, dict) else f"{key} {_value(item, key)}"
                 for key, item in value.items())  # fmt: skip
        return ", ".join(parts)
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, bool):
        return yes_or_no(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def shows(expected: Document, given: Given) -> Condition:
    """A check that a card routes the id as `expected` does and has all of its versions, by digest."""

    def missing(card: Document | None) -> str:
        if card is None:
            return "it does not know the adapter"
        if unknown := _versions(expected) - _versions(card):
            return f"it has no version {', '.join(str(version) for version, _ in sorted(unknown))} of this content"
        if _route(card) != _route(expected):
            return f"it serves {_route_text(card)} instead of {_route_text(expected)}"
        return ""

    return missing


def is_gone(version: int | None) -> Condition:
    """A check that there is no card any more, or one without `version`."""

    def missing(card: Document | None) -> str:
        if card is None or (version is not None and all(number != version for number, _ in _versions(card))):
            return ""
        return "it still has it"

    return missing


def _versions(card: Document) -> set[tuple[int, str]]:
    return {(version["version"], version["digest"]) for version in card.get("versions", [])}


def _route(card: Document) -> tuple[Any, ...]:
    canary = (card.get("route") or {}).get("canary") or {}
    return card.get("version"), card.get("digest"), canary.get("version"), canary.get("percent")


def _route_text(card: Document) -> str:
    version, _, other, share = _route(card)
    return f"version {version}" + (f" with {share} % to version {other}" if other is not None else "")
