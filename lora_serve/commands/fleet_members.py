"""`lora-serve fleet status | stop`: the engines of a running fleet, and their end."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.table import Table

from lora_serve.commands.flags import YES, CommandParser, adapter_id, argument
from lora_serve.commands.output import (
    Columns,
    CommandError,
    ExitCode,
    Output,
    confirm_deletion,
    plain,
    seconds_text,
    table_of,
)
from lora_serve.commands.verb import Document, Given, Verb, run_alone
from lora_serve.core.errors import ConfigError

if TYPE_CHECKING:
    from lora_serve.core.config import FleetConfig

_MAX_NAMES = 3  # of adapters in a line
_STOP = "Removes a fleet's engines from a Ray cluster. Servers that still run have none then, until one starts again."
_STOP_CODES = """exit codes:
  0    well
  1    not confirmed
  2    the command line is wrong, or no cluster can be reached
  4    there is no such fleet in the cluster"""


def show(arguments: list[str]) -> int:
    """Shows the replicas; returns the exit code (`commands.output.ExitCode`). Raises ConfigError."""
    return run_alone(STATUS, arguments)


def _adapter_or_digest(text: str) -> str:
    return text if text.startswith("sha256:") else adapter_id(text)


def _show_status(document: Document, given: Given) -> tuple[Table | str, ...]:
    parts: list[Table | str] = [] if "url" in given else [f"server {plain(given['server'])}"]
    replicas = document["data"]
    parts.append(table_of(replicas, _COLUMNS, _NUMBERS) if replicas else "no replica is there")
    if document["adapter"] is not None:
        parts += ["", _places(document["adapter"])]
    return tuple(parts)


def _names(slots: list[Document]) -> str:
    """The adapters with the most rows first; a pinned one has a star."""
    ranked = sorted(slots, key=lambda slot: (-slot["num_rows"], not slot["pinned"], slot["name"]))
    shown = [slot["name"] + "*" * slot["pinned"] for slot in ranked[:_MAX_NAMES]]
    more = len(ranked) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _places(found: Document) -> Table | str:
    places = [(version, place) for version in found["versions"] for place in version["places"]]
    if not places:
        return f"{plain(found['id'])} is on no replica; the next request for it loads it"
    columns: Columns = {
        "adapter": lambda _: found["id"],
        "version": lambda pair: "" if pair[0]["version"] is None else pair[0]["version"],
        "replica": lambda pair: pair[1]["replica"],
        "tiers": lambda pair: _tiers(pair[1]),
        "rows": lambda pair: pair[1]["num_rows"],
    }
    return table_of(places, columns, ("version", "rows"))


def _tiers(place: Document) -> str:
    marks = " (loading)" * place["is_loading"] + " (pinned)" * place["is_pinned"]
    return f"{', '.join(place['tiers'])}{marks}".strip()


def _notes(document: Document) -> Iterator[str]:
    for card in document["data"]:
        if card["reason"]:
            yield f"{card['id']} is {card['state']}: {card['reason']}"
    if document["restarts"]:
        yield f"engines lost and replaced since the server's start: {document['restarts']}"


_COLUMNS: Columns = {
    "replica": itemgetter("id"),
    "node": itemgetter("node"),
    "pid": lambda card: card["pid"] or "-",
    "state": itemgetter("state"),
    "age": lambda card: seconds_text(card["age_seconds"]),
    "requests": itemgetter("num_requests"),
    "running": itemgetter("num_running"),
    "waiting": itemgetter("num_waiting"),
    "waiting tokens": itemgetter("num_waiting_tokens"),
    "KV": lambda card: f"{1 - card['num_free_blocks'] / card['num_blocks']:.0%}" if card["num_blocks"] else "-",
    "slots": lambda card: f"{len(card['slots'])}/{card['max_loras']}",
    "host": itemgetter("num_host_adapters"),
    "loads": lambda card: card["tiers"].get("device", {}).get("loads", 0),
    "adapters": lambda card: _names(card["slots"]),
}
_NUMBERS = [title for title in _COLUMNS if title not in ("replica", "node", "state", "adapters")]
STATUS = Verb(
    "lora-serve fleet status",
    "Show the engines behind a running server: state, load, the adapters that each holds.",
    (),
    (
        argument(
            "--adapter", type=_adapter_or_digest, metavar="ID", help="where this adapter lives: an id, or a digest"
        ),
    ),
    "GET /admin/fleet",
    _show_status,
    hint=_notes,
)


def stop(arguments: list[str]) -> int:
    """Runs the subcommand; returns the exit code. Raises ConfigError."""
    flags = _stop_parser().parse_args(arguments)
    config = _config(flags)
    try:
        confirm_deletion("yes" in flags, f"the engines of the fleet {config.name} at {config.address}")
        _remove(config)
    except CommandError as error:
        Output(False).fail(error)
        return error.code
    print(f"the fleet {config.name} is gone", file=sys.stdout)  # noqa: T201
    return ExitCode.OK


def _stop_parser() -> CommandParser:
    parser = CommandParser("lora-serve fleet stop", _STOP, _STOP_CODES)
    parser.add_argument("--ray-address", required=True, metavar="A", help="HOST:PORT of the cluster, or auto")
    parser.add_argument("--fleet-name", default="lora-serve", metavar="N", help="as the servers' (default: lora-serve)")
    YES(parser)
    return parser


def _config(flags: argparse.Namespace) -> FleetConfig:
    from pydantic import ValidationError

    from lora_serve.core.config import FleetConfig
    from lora_serve.core.settings import Settings, describe

    if flags.ray_address == "none":
        raise ConfigError("--ray-address none: such a fleet ends with its server")
    try:
        Settings(model="any", engine="ray", ray_address=flags.ray_address, fleet_name=flags.fleet_name)
    except ValidationError as error:
        raise ConfigError(describe(error, {})) from None
    nothing = {"min_replicas": 1, "max_replicas": 1, "num_gpus": 0.0, "num_cpus": 0.0, "wait": 0.0}
    return FleetConfig(address=flags.ray_address, name=flags.fleet_name, **nothing)  # type: ignore[arg-type]


def _remove(config: FleetConfig) -> None:
    """Raises ConfigError, CommandError."""
    from lora_serve.engine_host.fleet.cluster import open_cluster

    with open_cluster(config):
        serve = importlib.import_module("ray.serve")
        app = importlib.import_module("lora_serve.engine_host.fleet.app")
        found = serve.status().applications
        there = sorted(name for name, one in found.items() if app.is_fleet(one.deployments))
        if config.name not in there:
            names = f"; there are {', '.join(there)}" if there else ""
            raise CommandError(ExitCode.NOT_FOUND, f"there is no fleet {config.name} at {config.address}{names}")
        serve.delete(config.name)
