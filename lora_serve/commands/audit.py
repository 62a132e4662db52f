"""`lora-serve audit`: who did what, newest first."""

from __future__ import annotations

import argparse
import csv
import sys
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from lora_serve.commands.flags import count
from lora_serve.commands.output import csv_cell, plain
from lora_serve.commands.verb import Call, Verb, all_pages, run_alone

PROGRAM = "lora-serve audit"
DEFAULT_LIMIT = 100
COLUMNS = ("time", "key", "tenant", "role", "action", "subject", "owner", "outcome", "digest", "request_id")


def run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_alone(
        Verb(PROGRAM, "Show the audit log: who did what, newest first.", (), _add_flags, show_audit), arguments
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="only acts by this tenant's keys, or about what it owns")
    parser.add_argument("--limit", type=count, default=DEFAULT_LIMIT, metavar="N", help="at most so many (100)")
    parser.add_argument("--after", metavar="ID", help="go on behind this line")
    parser.add_argument("--csv", action="store_true", help="comma-separated values instead of a table")


async def show_audit(call: Call) -> None:
    flags = call.flags
    document = await all_pages(call, "/admin/audit", flags.limit, tenant=flags.tenant, after=flags.after)
    if call.flags.csv and not call.output.as_json:
        _write_csv(document)
    else:
        call.output.show(document, _table(document))
    if document["has_more"] and not call.output.as_json:
        call.output.note(f"there are more: --limit, or --after {document['last_id']}")
    if not document.get("is_complete", True):
        call.output.warn(["other replicas' acts cannot be had at present: these are this server's own"])


def _table(document: dict[str, Any]) -> Table:
    table = Table(*(name.replace("_", " ") for name in COLUMNS[:8]), box=None, pad_edge=False)
    for row in document["data"]:
        table.add_row(*(plain(text) for text in _texts(row)[:8]))
    return table


def _texts(row: dict[str, Any]) -> list[str]:
    moment = datetime.fromtimestamp(row["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    return [moment, *(str(row[name]) for name in COLUMNS[1:])]


def _write_csv(document: dict[str, Any]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([csv_cell(text) for text in _texts(row)] for row in document["data"])
