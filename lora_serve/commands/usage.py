"""`lora-serve usage`: what tenants used, as a table or CSV."""

from __future__ import annotations

import argparse
import csv
import sys
from typing import Any

from rich.table import Table

from lora_serve.commands.output import byte_seconds_text, plain, seconds_text
from lora_serve.commands.verb import Call, Verb, run_alone

PROGRAM = "lora-serve usage"
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
SECONDS = ("queue_seconds", "load_seconds", "compute_seconds", "residency_byte_seconds")
_TITLES = {
    "queue_seconds": "queue",
    "load_seconds": "load",
    "compute_seconds": "compute",
    "residency_byte_seconds": "residency",
}


def run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_alone(Verb(PROGRAM, "Show what tenants used, as it was metered.", (), _add_flags, show_usage), arguments)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    parser.add_argument("--adapter", metavar="ID", help="only of this adapter; the base model's name for the base")
    parser.add_argument("--key", metavar="ID", help="only of this API key")
    parser.add_argument("--from", dest="start", metavar="TIME", help="Unix seconds or a date (UTC); default: all")
    parser.add_argument("--to", dest="end", metavar="TIME", help="likewise; the end is not included")
    parser.add_argument("--by", metavar="NAMES", help="sum by these: tenant, adapter, version, digest, key, time, day")
    parser.add_argument("--csv", action="store_true", help="comma-separated values instead of a table")


async def show_usage(call: Call) -> None:
    flags = call.flags
    given = {
        "tenant": flags.tenant,
        "adapter": flags.adapter,
        "key": flags.key,
        "from": flags.start,
        "to": flags.end,
        "by": flags.by,
    }
    query = {name: text for name, text in given.items() if text is not None}
    document = (await call.client.call("GET", "/admin/usage", query=query)).data
    if flags.csv and not call.output.as_json:
        _write_csv(document)
    else:
        call.output.show(document, _table(document))
    if not document.get("is_complete", True):
        call.output.warn(["other replicas' usage cannot be had at present: these figures are this server's own"])


def _table(document: dict[str, Any]) -> Table:
    by = list(document["by"])
    table = Table(*by, box=None, pad_edge=False)
    for name in (*COUNTS, *SECONDS):
        table.add_column(_TITLES.get(name, name.replace("_", " ")), justify="right")
    for row in document["data"]:
        figures = [f"{row[name]}" for name in COUNTS] + [_figure(name, row[name]) for name in SECONDS]
        table.add_row(*(plain(row[name]) for name in by), *figures)
    return table


def _figure(name: str, value: float) -> str:
    return byte_seconds_text(value) if name.startswith("residency") else seconds_text(value)


def _write_csv(document: dict[str, Any]) -> None:
    names = [*document["by"], *COUNTS, *SECONDS]
    writer = csv.DictWriter(sys.stdout, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(document["data"])
