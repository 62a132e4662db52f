"""An adapter's card, as tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from lora_serve.commands.output import bytes_text, plain, time_text

# Fields of the first table that are shown under another name; all others keep the server's name.
_SHOWN = {"id", "object", "tenant", "pinned", "created", "version", "route", "aliases", "digest", "bytes", "state",
          "tiers", "targets", "kinds", "metadata", "versions", "warnings", "shared_with",
          "defaults", "replicas"}  # fmt: skip
_LIST = ("id", "version", "rank", "size", "state", "tiers", "hits", "misses", "pinned")
_RIGHT = ("rank", "size", "hits", "misses")


def list_table(cards: list[dict[str, Any]]) -> Table:
    table = _table(*_LIST)
    for card in cards:
        cells = [card["id"], route_text(card), card["rank"], bytes_text(card["bytes"]), card["state"]]
        cells += [", ".join(card["tiers"]), card["hits"], card["misses"], "yes" if card["pinned"] else ""]
        table.add_row(*map(plain, cells))
    return table


def card_table(card: dict[str, Any]) -> Iterator[Table]:
    """The adapter's facts, then a line per version."""
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(card):
        facts.add_row(plain(name), plain(value))
    yield facts
    versions = _table("version", "created", "rank", "size", "state", "tiers", "source", "digest")
    for version in card["versions"]:
        cells = [version["version"], time_text(version["created"]), version["rank"], bytes_text(version["bytes"])]
        cells += [version["state"], ", ".join(version["tiers"]), version["source"], version["digest"]]
        versions.add_row(*map(plain, cells))
    yield versions


def metadata_text(card: dict[str, Any]) -> str:
    """The metadata, a line each, and the defaults that requests have of it."""
    lines = [f"  {plain(name)}: {json.dumps(value)}" for name, value in card["metadata"].items()]
    return "\n".join(["metadata:" if lines else "metadata: none", *lines, defaults_text(card)])


def defaults_text(card: dict[str, Any]) -> str:
    """The defaults in force, a line each."""
    lines = [f"  {plain(name)}: {json.dumps(value)}" for name, value in (card.get("defaults") or {}).items()]
    return "\n".join(["defaults of requests:" if lines else "defaults of requests: none", *lines])


def route_text(card: dict[str, Any]) -> str:
    """3, or 3 (4: 10 %) while a canary takes a share."""
    canary = (card.get("route") or {}).get("canary")
    text = str(card["version"])
    return f"{text} ({canary['version']}: {canary['percent']:g} %)" if canary else text


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
    yield "pinned", "yes" if card["pinned"] else "no"
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
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT else "left", overflow="fold")
    return table
