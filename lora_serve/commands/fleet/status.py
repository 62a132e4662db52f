"""`lora-serve fleet status`: the engines of a running server, and where an adapter lives among them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from lora_serve.commands.flags import adapter_id
from lora_serve.commands.output import plain, seconds_text
from lora_serve.commands.verb import Call, Verb, run_alone

_MAX_NAMES = 3  # of adapters in a line
_COUNTS = ("age", "requests", "running", "waiting", "waiting tokens", "KV", "slots", "host", "loads")
_COLUMNS = ("replica", "node", "pid", "state", *_COUNTS, "adapters")


def run(arguments: list[str]) -> int:
    """Runs the subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    summary = "Show the engines behind a running server: state, load, the adapters that each holds."
    return run_alone(Verb("lora-serve fleet status", summary, (), _flags, show_status), arguments)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", type=_name, metavar="ID", help="where this adapter lives: an id, or a digest")


def _name(text: str) -> str:
    return text if text.startswith("sha256:") else adapter_id(text)


async def show_status(call: Call) -> None:
    wanted = call.flags.adapter
    query = {} if wanted is None else {"adapter": wanted}
    document = (await call.client.call("GET", "/admin/fleet", query=query)).data
    parts: list[Table | str] = [] if vars(call.flags).get("url") else [f"server {plain(call.client.url)}"]
    parts.append(_replicas(document["data"]) if document["data"] else "no replica is there")
    if document["adapter"] is not None:
        parts += ["", *_places(document["adapter"])]
    call.output.show(document, *parts)
    if not call.output.as_json:
        call.output.note(*_notes(document))


def _replicas(cards: list[dict[str, Any]]) -> Table:
    table = _table(_COLUMNS, ("pid", *_COUNTS))
    for card in cards:
        table.add_row(*map(plain, _cells(card)))
    return table


def _cells(card: dict[str, Any]) -> Iterator[object]:
    num_blocks = card["num_blocks"]
    yield card["id"]
    yield card["node"]
    yield card["pid"] or "-"
    yield card["state"]
    yield seconds_text(card["age_seconds"])
    yield card["num_requests"]
    yield card["num_running"]
    yield card["num_waiting"]
    yield card["num_waiting_tokens"]
    yield f"{1 - card['num_free_blocks'] / num_blocks:.0%}" if num_blocks else "-"
    yield f"{len(card['slots'])}/{card['max_loras']}"
    yield card["num_host_adapters"]
    yield card["tiers"].get("device", {}).get("loads", 0)
    yield _names(card["slots"])


def _names(slots: list[dict[str, Any]]) -> str:
    """The adapters with the most rows first; a pinned one has a star."""
    ranked = sorted(slots, key=lambda slot: (-slot["num_rows"], not slot["pinned"], slot["name"]))
    shown = [slot["name"] + "*" * slot["pinned"] for slot in ranked[:_MAX_NAMES]]
    more = len(ranked) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _places(found: dict[str, Any]) -> Iterator[Table | str]:
    places = [(version, place) for version in found["versions"] for place in version["places"]]
    if not places:
        yield f"{plain(found['id'])} is on no replica; the next request for it loads it"
        return
    table = _table(("adapter", "version", "replica", "tiers", "rows"), ("version", "rows"))
    for version, place in places:
        tiers = ", ".join(place["tiers"]) + " (loading)" * place["is_loading"] + " (pinned)" * place["is_pinned"]
        number = "" if version["version"] is None else version["version"]
        table.add_row(*map(plain, (found["id"], number, place["replica"], tiers.strip(), place["num_rows"])))
    yield table


def _notes(document: dict[str, Any]) -> Iterator[str]:
    for card in document["data"]:
        if card["reason"]:
            yield f"{card['id']} is {card['state']}: {card['reason']}"
    if document["restarts"]:
        yield f"engines lost and replaced since the server's start: {document['restarts']}"


def _table(columns: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table
