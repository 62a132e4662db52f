"""`lora-serve registry`: the registry itself, without a server. Here: export | import | migrate | backup | restore; in
`registry_checking.py`: show | check | rebuild | accept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from lora_serve.adapters.maintenance.backup import BackupError, OtherDatabases, back_up, restore
from lora_serve.adapters.maintenance.copying import BackupList, OnProgress
from lora_serve.adapters.maintenance.registries import RegistryAddress
from lora_serve.adapters.maintenance.transfer import (
    MergeOutcome,
    Transfer,
    TransferReport,
    finish_export,
    is_unfinished,
    open_ends,
)
from lora_serve.commands.flags import argument, make_parser, run_subcommand
from lora_serve.commands.output import Output, bytes_text, plain, time_text
from lora_serve.commands.registry_checking import (
    EXIT_CODES,
    LOOK_VERBS,
    MEND_VERBS,
    REDIS_PREFIX,
    REGISTRY,
    RegistryVerb,
    folder_address,
    folder_or_url,
    names_text,
    registry_address,
    run_verb,
)
from lora_serve.core.errors import AdapterUnavailableError, ConfigError
from lora_serve.tenancy import audit_journal, directory
from lora_serve.tenancy import usage as usage_journal

PROGRAM = "lora-serve registry"
DESCRIPTION = """Works on the registry itself, a store folder or Redis, without a server. A store folder is locked
meanwhile, so no server may be using it, but for `backup`; Redis may be live. `export`, `import` and `migrate` carry
adapters from one registry to another, and no keys; `backup` and `restore` keep all that a server knows, keys as
hashes."""
_OTHERS = OtherDatabases(
    (directory.FILE_NAME, usage_journal.FILE_NAME, audit_journal.FILE_NAME), {directory.FILE_NAME: directory.JOURNAL}
)
_NO_SECRETS = "tenants' keys are in it as hashes only; the admin key is not: a restored store makes a new one"


def run(arguments: list[str]) -> int:
    """The exit code (`EXIT_CODES`). Raises ConfigError for a wrong command line, or a registry that is not there."""
    parser = make_parser(PROGRAM, DESCRIPTION, EXIT_CODES, VERBS, _add_json)
    return run_subcommand(parser, arguments, run_verb)


def _add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output, nothing else")


def _export(flags: argparse.Namespace, output: Output) -> bool:
    source, target = registry_address(flags), folder_address("--to", flags.to)
    return _copy("export", source, target, False, output)


def _import(flags: argparse.Namespace, output: Output) -> bool:
    source, target = folder_address("--from", flags.source), registry_address(flags)
    return _copy("import", source, target, flags.overwrite, output)


def _migrate(flags: argparse.Namespace, output: Output) -> bool:
    source, target = folder_or_url("--from", flags.source, flags), folder_or_url("--to", flags.to, flags)
    is_done = _copy("migrate", source, target, flags.overwrite, output)
    if is_done and not output.as_json:
        output.note(*_next_steps(target))
    return is_done


def _copy(verb: str, source: RegistryAddress, target: RegistryAddress, overwrite: bool, output: Output) -> bool:
    """Copies adapters; True if the target has everything. Raises ConfigError, AdapterUnavailableError."""
    if _is_same(source, target):
        raise ConfigError(f"{source.flag} and {target.flag} name the same registry")
    if not source.is_redis and is_unfinished(source.folder):
        output.warn([f"the export in {source.text} was never completed; what is there is copied"])
    is_export = verb == "export"
    label = f"{verb} to {target.text}"
    with open_ends(source, target, is_export) as (first, second), output.progress_of(label) as on_progress:
        report = Transfer(first, second, overwrite, on_progress).run()
        if is_export and report.is_whole:
            try:
                finish_export(second)
            except OSError as error:
                raise AdapterUnavailableError(f"The export cannot be completed: {error.strerror}.") from None
    output.show(_document(verb, source, target, report), _sentence(report, target))
    _complain(report, output)
    return report.is_whole


def _is_same(source: RegistryAddress, target: RegistryAddress) -> bool:
    if source.is_redis or target.is_redis:
        return (source.target, source.redis_prefix) == (target.target, target.redis_prefix)
    return source.folder.resolve() == target.folder.resolve()


def _document(verb: str, source: RegistryAddress, target: RegistryAddress, report: TransferReport) -> dict[str, Any]:
    def ids(outcome: MergeOutcome) -> list[str]:
        return [line.name for line in report.named(outcome)]

    def reasons(outcome: MergeOutcome) -> list[dict[str, str]]:
        return [{"id": line.name, "reason": line.reason} for line in report.named(outcome)]

    return {
        "object": f"registry.{verb}",
        "from": source.text,
        "to": target.text,
        "is_whole": report.is_whole,
        "made": ids(MergeOutcome.MADE),
        "overwritten": ids(MergeOutcome.OVERWRITTEN),
        "unchanged": ids(MergeOutcome.UNCHANGED),
        "conflicts": reasons(MergeOutcome.CONFLICT),
        "refused": reasons(MergeOutcome.REFUSED),
        "unreadable": list(report.unreadable),
        "blobs": report.num_blobs,
        "bytes": report.num_bytes,
    }


def _sentence(report: TransferReport, target: RegistryAddress) -> str:
    """The summary, e.g. "3 adapters made, 1 unchanged in DIR; 4 blobs (12.0 MB) copied"."""
    counts = {outcome: len(report.named(outcome)) for outcome in MergeOutcome}
    first = f"{_counted(counts.pop(MergeOutcome.MADE), 'adapter')} made"
    rest = [f"{count} {outcome.value}" for outcome, count in counts.items() if count]
    blobs = f"{_counted(report.num_blobs, 'blob')} ({bytes_text(report.num_bytes)}) copied"
    return f"{', '.join((first, *rest))} in {plain(target.text)}; {blobs}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _complain(report: TransferReport, output: Output) -> None:
    for outcome in (MergeOutcome.CONFLICT, MergeOutcome.REFUSED):
        output.note(*(f"{outcome.value}: {line.name}: {line.reason}" for line in report.named(outcome)))
    output.note(*(f"refused: {name}: its record in the source cannot be read" for name in report.unreadable))
    if report.named(MergeOutcome.CONFLICT):
        output.note("nothing of a conflict was written; --overwrite makes these ids what the source says")


def _next_steps(target: RegistryAddress) -> tuple[str, ...]:
    keys = "keys are not copied: each server has the admin key of its own --store, or of --admin-key"
    if not target.is_redis:
        return f"next: start one server with --store {target.text} and without --redis-url", keys
    prefix = "" if target.redis_prefix == "lora_serve" else f" --redis-prefix {target.redis_prefix}"
    first = f"next: start the servers with --redis-url {target.text}{prefix}, each with a --store folder of its own"
    return first, keys


def _backup(flags: argparse.Namespace, output: Output) -> bool:
    source, target = registry_address(flags), folder_address("--to", flags.to)
    return _run_backup("backup", source, target, back_up, output)


def _restore(flags: argparse.Namespace, output: Output) -> bool:
    source, target = folder_address("--from", flags.source), registry_address(flags)
    return _run_backup("restore", source, target, restore, output)


def _run_backup(
    verb: str,
    source: RegistryAddress,
    target: RegistryAddress,
    work: Callable[[RegistryAddress, RegistryAddress, OtherDatabases, OnProgress], BackupList],
    output: Output,
) -> bool:
    with output.progress_of(f"{verb} to {target.text}") as on_progress:
        try:
            listed = work(source, target, _OTHERS, on_progress)
        except BackupError as error:
            output.note(str(error))
            return False
    document = {
        "object": f"registry.{verb}",
        "from": source.text,
        "to": target.text,
        "taken": int(listed.taken),
        "epoch": listed.position.epoch,
        "generation": listed.position.generation,
        "databases": list(listed.databases),
        "blobs": len(listed.digests),
        "missing": [{"digest": digest, "named_by": list(labels)} for digest, labels in listed.missing.items()],
    }
    what = f"{len(listed.digests)} blobs and {', '.join(listed.databases)}"
    done = "backed up in" if verb == "backup" else "restored in"
    output.show(document, f"{what}, as they were at {time_text(int(listed.taken))}, {done} {plain(target.text)}")
    if not output.as_json:
        output.note(_NO_SECRETS)
    output.note(*(_missing_line(verb, digest, labels) for digest, labels in listed.missing.items()))
    return not listed.missing


def _missing_line(verb: str, digest: str, labels: Sequence[str]) -> str:
    reason = "cannot be read where it is kept" if verb == "backup" else "was not in the backup: register it again"
    return f"missing: {digest}, named by {names_text(labels)}: it {reason}"


_OVERWRITE = argument(
    "--overwrite",
    action="store_true",
    default=False,
    help="an id that is another one there becomes exactly what the source says: its other versions go",
)
COPY_VERBS = (
    RegistryVerb(
        "export",
        "Write the whole registry into a folder: a backup, on which `serve --store FOLDER` can run.",
        (
            "export --to backup-2026-01-31",
            "export --to backup --store /srv/lora_serve",
            "export --to backup --redis-url redis://redis:6379/0",
        ),
        (
            argument("--to", required=True, metavar="FOLDER", help="new or empty, or of an export that broke off"),
            *REGISTRY,
        ),
        _export,
    ),
    RegistryVerb(
        "import",
        "Bring an exported folder into a registry; ids that are there with the same versions are left alone.",
        (
            "import --from backup --store /srv/lora_serve",
            "import --from backup --redis-url redis://redis:6379/0 --json",
        ),
        (
            argument("--from", required=True, dest="source", metavar="FOLDER", help="what an export has written"),
            *REGISTRY,
            _OVERWRITE,
        ),
        _import,
    ),
    RegistryVerb(
        "migrate",
        "Copy a registry from a store folder to Redis, back, or between two of a kind; both have it afterwards.",
        (
            "migrate --from /srv/lora_serve --to redis://redis:6379/0",
            "migrate --from redis://redis:6379/0 --to /srv/lora_serve --overwrite",
        ),
        (
            argument("--from", required=True, dest="source", metavar="DIR|URL", help="a store folder, or a Redis URL"),
            argument("--to", required=True, metavar="DIR|URL", help="a store folder, or a Redis URL"),
            REDIS_PREFIX,
            _OVERWRITE,
        ),
        _migrate,
    ),
)
BACKUP_VERBS = (
    RegistryVerb(
        "backup",
        "Copy adapters, tenants, hashed keys, usage and audit log into a folder, beside a running server.",
        (
            "backup --to backup-2026-01-31 --store /srv/lora_serve",
            "backup --to backup --redis-url redis://redis:6379/0",
        ),
        (
            argument("--to", required=True, metavar="FOLDER", help="new or empty, or of a backup that broke off"),
            *REGISTRY,
        ),
        _backup,
    ),
    RegistryVerb(
        "restore",
        "Make a store folder, or the registry in an empty Redis, from a backup.",
        (
            "restore --from backup-2026-01-31 --store /srv/restored",
            "restore --from backup --redis-url redis://redis:6379/0",
        ),
        (
            argument("--from", required=True, dest="source", metavar="FOLDER", help="what a backup has written"),
            *REGISTRY,
        ),
        _restore,
    ),
)
VERBS: tuple[RegistryVerb, ...] = (*COPY_VERBS, *LOOK_VERBS, *MEND_VERBS, *BACKUP_VERBS)
