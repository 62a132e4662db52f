"""`lora-serve registry show | check | rebuild | accept`, and the registry that flags or environment name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
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
from lora_serve.adapters.maintenance.registries import (
    Inventory,
    OpenRegistry,
    RegistryAddress,
    bad_blobs,
    inventory_of,
    open_registry,
)
from lora_serve.commands.flags import DEFAULT_STORE, Subcommand, argument, one_of
from lora_serve.commands.output import Columns, CommandError, ExitCode, Output, bytes_text, facts_table, plain, table_of
from lora_serve.core.errors import AdapterUnavailableError, ConfigError
from lora_serve.core.setting_texts import check_redis_prefix

DEFAULT_PREFIX = "lora_serve"
EXIT_CODES = """exit codes:
  0    well
  1    something could not be copied, or is not sound: each is named on standard error
  2    the command line is wrong, a folder is in use or cannot be used, or there is no registry
  5    Redis or the disk failed: what is there is whole; run the same again
  130  interrupted (Ctrl-C): what is there is whole; run the same again"""


@dataclass(frozen=True, slots=True)
class RegistryVerb(Subcommand):
    run: Callable[[argparse.Namespace, Output], bool]
    """Returns True if all is well. Raises ConfigError, AdapterUnavailableError."""


def run_verb(verb: RegistryVerb, flags: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code. Raises ConfigError."""
    output = Output(flags.json)
    try:
        return ExitCode.OK if verb.run(flags, output) else ExitCode.REFUSED
    except AdapterUnavailableError as error:
        output.fail(CommandError(ExitCode.UNAVAILABLE, str(error)))
        return ExitCode.UNAVAILABLE
    except KeyboardInterrupt:
        output.note("interrupted")
        return ExitCode.INTERRUPTED


REDIS_PREFIX = argument(
    "--redis-prefix",
    metavar="TEXT",
    default=None,
    help=f"beginning of every key in Redis (LORA_SERVE_REDIS_PREFIX; default: {DEFAULT_PREFIX})",
)
REGISTRY = (  # --store and --redis-url, as `serve` has them
    one_of(
        argument(
            "--store",
            metavar="DIR",
            default=None,
            help=f"the store folder of a registry of one server (LORA_SERVE_STORE; default: ./{DEFAULT_STORE})",
        ),
        argument(
            "--redis-url",
            metavar="URL",
            default=None,
            help="the registry that replicas share (LORA_SERVE_REDIS_URL)",
        ),
    ),
    REDIS_PREFIX,
)


def registry_address(flags: argparse.Namespace) -> RegistryAddress:
    """The registry of --store or --redis-url, else of the environment. Raises ConfigError."""
    if flags.store is not None:
        return folder_address("--store", flags.store)
    url = flags.redis_url or os.environ.get("LORA_SERVE_REDIS_URL")
    if url:
        address = RegistryAddress(url, "--redis-url", redis_prefix(flags))
        if not address.is_redis:
            raise ConfigError("--redis-url: expected redis://host:port/db, rediss:// or unix://")
        return address
    return folder_address("--store", os.environ.get("LORA_SERVE_STORE") or DEFAULT_STORE)


def folder_or_url(flag: str, text: str, flags: argparse.Namespace) -> RegistryAddress:
    """A folder, or a Redis URL. Raises ConfigError."""
    address = RegistryAddress(text, flag, redis_prefix(flags))
    return address if address.is_redis else folder_address(flag, text)


def redis_prefix(flags: argparse.Namespace) -> str:
    """The prefix of --redis-prefix or the environment. Raises ConfigError."""
    given = flags.redis_prefix
    if given is None:
        given = os.environ.get("LORA_SERVE_REDIS_PREFIX") or DEFAULT_PREFIX
    try:
        return check_redis_prefix(given)
    except ValueError as error:
        raise ConfigError(f"--redis-prefix: {error} (got {given[:200]!r})") from None


def folder_address(flag: str, text: str) -> RegistryAddress:
    """The folder; raises ConfigError for a URL."""
    scheme, is_url, _ = text.partition("://")
    if is_url:
        raise ConfigError(f"{flag}: expected a folder, or redis:// where a URL is allowed (got {scheme[:20]}://...)")
    if not text:
        raise ConfigError(f"{flag}: expected a folder (got '')")
    return RegistryAddress(text, flag)


def _show(flags: argparse.Namespace, output: Output) -> bool:
    with open_registry(registry_address(flags), is_source=True) as place:
        if flags.id is None:
            document = _contents(place, inventory_of(place))
            output.show(document, _contents_table(document))
        else:
            document = _adapter(place, flags.id)
            output.show(document, table_of(document["versions"], _VERSIONS, overflow="fold"))
    return True


_VERSIONS: Columns = {name: itemgetter(name) for name in ("version", "digest", "blob")}


def _adapter(place: OpenRegistry, name: str) -> dict[str, Any]:
    """An adapter's versions. `blob`: its folder, as registrations take it; null in Redis."""
    if (entry := place.catalog.snapshot.entries.get(name)) is None:
        raise ConfigError(f"{place.address.text} has no adapter {name[:200]!r}")
    blobs = None if place.address.is_redis else f"{place.address.text}/blobs/"
    versions = [
        {"version": one.version, "digest": one.digest, "blob": blobs and blobs + one.digest.removeprefix("sha256:")}
        for one in entry.versions
    ]
    return {"object": "registry.adapter", "id": name, "versions": versions}


def _contents(place: OpenRegistry, stock: Inventory) -> dict[str, Any]:
    position = place.catalog.snapshot.position
    return {
        "object": "registry",
        "kind": "redis" if place.address.is_redis else "embedded",
        "place": place.address.text,
        "epoch": position.epoch,
        "generation": position.generation,
        "adapters": stock.num_adapters,
        "versions": stock.num_versions,
        "aliases": stock.num_aliases,
        "bytes": stock.num_bytes,
        "blobs": stock.num_blobs,
        "missing": list(stock.missing),
        "unnamed": list(stock.unnamed),
        "aside": list(stock.aside),
        "unreadable": list(place.unreadable),
    }


def _contents_table(document: dict[str, Any]) -> Table:
    """A table of the lists' lengths, then their items."""
    facts = list(document.items())[1:]
    return facts_table((name, _fact(name, value)) for name, value in facts)


def _fact(name: str, value: Any) -> object:
    if isinstance(value, list):
        return ", ".join([str(len(value)), *value])
    return bytes_text(value) if name == "bytes" else value


def _check(flags: argparse.Namespace, output: Output) -> bool:
    with open_registry(registry_address(flags), is_source=True) as place:
        with output.progress_of(f"check {place.address.text}") as on_progress:
            bad = list(bad_blobs(place, on_progress))
        num_blobs = len(place.catalog.snapshot.digests)
        unreadable, text = place.unreadable, place.address.text
    document = {
        "object": "registry.check",
        "place": text,
        "is_whole": not (bad or unreadable),
        "blobs": num_blobs,
        "bad": [{"digest": blob.digest, "problem": blob.problem, "named_by": list(blob.labels)} for blob in bad],
        "unreadable": list(unreadable),
    }
    output.show(document, f"{num_blobs} blobs in {plain(text)}: {num_blobs - len(bad)} sound, {len(bad)} not")
    output.note(*(f"{blob.problem}: {blob.digest}, named by {names_text(blob.labels)}" for blob in bad))
    output.note(*(f"unreadable: {name}: its record makes no sense" for name in unreadable))
    return not (bad or unreadable)


def names_text(names: Sequence[str]) -> str:
    """The names, of more than eight the first ones."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _rebuild(flags: argparse.Namespace, output: Output) -> bool:
    address = registry_address(flags)
    also = [_existing(folder_address("--also", text)) for text in flags.also]
    with output.progress_of(f"rebuild {address.text}") as on_progress:
        if address.is_redis:
            rebuilt = rebuild_redis(address, also, flags.dry_run, on_progress)
        else:
            rebuilt = rebuild_folder(_existing(address), also, flags.dry_run, on_progress)
    output.show(
        _rebuild_document(address, rebuilt, flags.dry_run),
        table_of(rebuilt.plan.ids, _COLUMNS),
        _sentence(address, rebuilt, flags.dry_run),
    )
    _complain(rebuilt, output)
    return rebuilt.is_whole


def _existing(address: RegistryAddress) -> Path:
    if not address.folder.is_dir():
        raise ConfigError(f"{address.flag} {address.text}: there is no such folder")
    return address.folder


def _rebuild_document(address: RegistryAddress, rebuilt: RebuildReport, is_dry: bool) -> dict[str, Any]:
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


_COLUMNS: Columns = {
    "id": lambda one: one.name,
    "tenant": lambda one: one.entry.tenant if one.entry else "-",
    "fate": lambda one: one.outcome.value,
    "versions": lambda one: " ".join(str(version.version) for version in one.entry.versions) if one.entry else "-",
    "meant": lambda one: one.entry.default_version if one.entry else "-",
}


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
    output.note(*(_left_out_line(one) for one in rebuilt.plan.ids if one.missing or one.entry is None))
    output.note(*(f"dropped: the alias {alias} leads nowhere" for alias in rebuilt.plan.dropped_aliases))


def _left_out_line(one: RebuiltId) -> str:
    if not one.missing:
        return f"{one.outcome.value}: {one.name}: its record cannot be read, and there is no other: it is free"
    what = "it cannot be served" if one.outcome is RebuildOutcome.UNCHANGED else "left out"
    return f"{one.outcome.value}: {one.name}: no sound blob of version {names_text(one.missing)}: {what}"


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


LOOK_VERBS = (
    RegistryVerb(
        "show",
        "Say what a registry holds: adapters, versions, aliases, blobs missing or unnamed; or where an adapter's are.",
        ("show", "show acme/support --store restored", "show --redis-url redis://redis:6379/0 --json"),
        (argument("id", nargs="?", default=None, metavar="ID", help="an adapter, for its versions alone"), *REGISTRY),
        _show,
    ),
    RegistryVerb(
        "check",
        "Read and verify every blob that a version names; missing and corrupt ones are listed.",
        ("check --store /srv/lora_serve", "check --redis-url redis://redis:6379/0"),
        REGISTRY,
        _check,
    ),
)
MEND_VERBS = (
    RegistryVerb(
        "rebuild",
        "Make a catalog again that was lost, damaged or set back, from the blobs and the records beside them.",
        (
            "rebuild --store /srv/lora_serve --dry-run",
            "rebuild --redis-url redis://redis:6379/0 --also /srv/replica-1 --also /srv/replica-2",
        ),
        (
            *REGISTRY,
            argument(
                "--also",
                action="append",
                default=[],
                metavar="DIR",
                help="another store folder to take blobs from: a replica's, an old one; repeatable",
            ),
            argument("--dry-run", action="store_true", default=False, help="say what would be, and write nothing"),
        ),
        _rebuild,
    ),
    RegistryVerb(
        "accept",
        "Go on with the catalog that is there, or none; blobs that it does not name are kept aside for a rebuild.",
        ("accept --store /srv/lora_serve", "accept --redis-url redis://redis:6379/0"),
        REGISTRY,
        _accept,
    ),
)
