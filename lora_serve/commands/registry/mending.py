"""`lora-serve registry rebuild | accept`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from lora_serve.adapters.maintenance.rebuild import (
    RebuildReport,
    accept_folder,
    accept_redis,
    rebuild_folder,
    rebuild_redis,
)
from lora_serve.adapters.maintenance.rebuild_plan import RebuildOutcome, RebuiltId
from lora_serve.adapters.maintenance.registries import RegistryAddress
from lora_serve.commands.output import Output, plain
from lora_serve.commands.registry.addresses import add_registry_flags, folder_address, registry_address
from lora_serve.commands.registry.verb import Verb
from lora_serve.core.errors import ConfigError


def _rebuild_flags(parser: argparse.ArgumentParser) -> None:
    add_registry_flags(parser)
    parser.add_argument("--also", action="append", default=[], metavar="DIR", help="another store folder to take blobs "
                        "from: a replica's, an old one; repeatable")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be, and write nothing")


def _rebuild(flags: argparse.Namespace, output: Output) -> bool:
    address = registry_address(flags)
    also = [_existing(folder_address("--also", text)) for text in flags.also]
    with output.progress_of(f"rebuild {address.text}") as on_progress:
        if address.is_redis:
            rebuilt = rebuild_redis(address, also, flags.dry_run, on_progress)
        else:
            rebuilt = rebuild_folder(_existing(address), also, flags.dry_run, on_progress)
    output.show(_document(address, rebuilt, flags.dry_run), _table(rebuilt), _sentence(address, rebuilt, flags.dry_run))
    _complain(rebuilt, output)
    return rebuilt.is_whole


def _existing(address: RegistryAddress) -> Path:
    if not address.folder.is_dir():
        raise ConfigError(f"{address.flag} {address.text}: there is no such folder")
    return address.folder


def _document(address: RegistryAddress, rebuilt: RebuildReport, is_dry: bool) -> dict[str, Any]:
    return {
        "object": "registry.rebuild",
        "place": address.text,
        "dry_run": is_dry,
        "is_whole": rebuilt.is_whole,
        "catalog_was": rebuilt.was,
        "kept_catalog": rebuilt.kept,
        "adapters": [
            {
                "id": one.name,
                "fate": one.outcome.value,
                "tenant": one.entry.tenant if one.entry else None,
                "versions": [version.version for version in one.entry.versions] if one.entry else [],
                "default_version": one.entry.default_version if one.entry else None,
                "missing": list(one.missing),
            }
            for one in rebuilt.plan.ids
        ],
        "aliases": dict(rebuilt.plan.aliases),
        "dropped_aliases": list(rebuilt.plan.dropped_aliases),
        "aside": list(rebuilt.aside),
    }


def _table(rebuilt: RebuildReport) -> Table:
    table = Table("id", "tenant", "fate", "versions", "meant", box=None, pad_edge=False)
    for one in rebuilt.plan.ids:
        entry = one.entry
        versions = " ".join(str(version.version) for version in entry.versions) if entry else "-"
        meant = str(entry.default_version) if entry else "-"
        table.add_row(plain(one.name), plain(entry.tenant if entry else "-"), one.outcome.value, versions, meant)
    return table


def _sentence(address: RegistryAddress, rebuilt: RebuildReport, is_dry: bool) -> str:
    """The summary, e.g. "The catalog was lost: 3 adapters restored in DIR; ..."."""
    counts = {outcome: sum(one.outcome is outcome for one in rebuilt.plan.ids) for outcome in RebuildOutcome}
    said = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count) or "none"
    would = " (nothing was written)" if is_dry else ""
    kept = f"; the old one is {rebuilt.kept}" if rebuilt.kept else ""
    was = {"good": "is good", "older": "was older than its blobs"}.get(rebuilt.was, f"was {rebuilt.was}")
    return (
        f"the catalog {was}{kept}; adapters in {plain(address.text)}: {said}; "
        f"{len(rebuilt.aside)} blobs that nothing names are kept{would}"
    )


def _complain(rebuilt: RebuildReport, output: Output) -> None:
    output.note(*(_complaint(one) for one in rebuilt.plan.ids if one.missing or one.entry is None))
    output.note(*(f"dropped: the alias {alias} leads nowhere" for alias in rebuilt.plan.dropped_aliases))


def _complaint(one: RebuiltId) -> str:
    if not one.missing:
        return f"{one.outcome.value}: {one.name}: its record cannot be read, and there is no other: it is free"
    more = f" and {len(one.missing) - 8} more" if len(one.missing) > 8 else ""
    what = "it cannot be served" if one.outcome is RebuildOutcome.UNCHANGED else "left out"
    return f"{one.outcome.value}: {one.name}: no sound blob of version {', '.join(one.missing[:8])}{more}: {what}"


def _accept(flags: argparse.Namespace, output: Output) -> bool:
    address = registry_address(flags)
    num_aside = 0
    if address.is_redis:
        accept_redis(address)
    else:
        num_aside = accept_folder(_existing(address))
    document = {"object": "registry.accept", "place": address.text, "aside": num_aside}
    output.show(document, f"{num_aside} blobs that the catalog does not name were set aside in {plain(address.text)}")
    return True


VERBS = (
    Verb(
        "rebuild",
        "Make a catalog again that was lost, damaged or set back, from the blobs and the records beside them.",
        (
            "rebuild --store /srv/lora_serve --dry-run",
            "rebuild --redis-url redis://redis:6379/0 --also /srv/replica-1 --also /srv/replica-2",
        ),
        _rebuild_flags,
        _rebuild,
    ),
    Verb(
        "accept",
        "Go on with the catalog that is there, or none; blobs that it does not name are kept aside for a rebuild.",
        ("accept --store /srv/lora_serve", "accept --redis-url redis://redis:6379/0"),
        add_registry_flags,
        _accept,
    ),
)
