"""`lora-serve registry backup | restore`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from lora_serve.adapters.maintenance.backup import BackupError, OtherDatabases, back_up, restore
from lora_serve.adapters.maintenance.backup_folder import BackupList
from lora_serve.adapters.maintenance.blob_copier import OnProgress
from lora_serve.adapters.maintenance.registries import RegistryAddress
from lora_serve.commands.output import Output, plain, time_text
from lora_serve.commands.registry.addresses import add_registry_flags, folder_address, registry_address
from lora_serve.commands.registry.verb import Verb
from lora_serve.tenancy.audit import journal as audit_journal
from lora_serve.tenancy.directory import opening
from lora_serve.tenancy.usage import journal as usage_journal

_OTHERS = OtherDatabases(
    (opening.FILE_NAME, usage_journal.FILE_NAME, audit_journal.FILE_NAME), {opening.FILE_NAME: opening.JOURNAL}
)
_NO_SECRETS = "tenants' keys are in it as hashes only; the admin key is not: a restored store makes a new one"


def _backup_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, metavar="FOLDER", help="new or empty, or of a backup that broke off")
    add_registry_flags(parser)


def _restore_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", required=True, dest="source", metavar="FOLDER", help="what a backup has written")
    add_registry_flags(parser)


def _backup(flags: argparse.Namespace, output: Output) -> bool:
    source, target = registry_address(flags), folder_address("--to", flags.to)
    return _run("backup", source, target, back_up, output)


def _restore(flags: argparse.Namespace, output: Output) -> bool:
    source, target = folder_address("--from", flags.source), registry_address(flags)
    return _run("restore", source, target, restore, output)


def _run(
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
    output.note(*(_complaint(verb, digest, labels) for digest, labels in listed.missing.items()))
    return not listed.missing


def _complaint(verb: str, digest: str, labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    reason = "cannot be read where it is kept" if verb == "backup" else "was not in the backup: register it again"
    return f"missing: {digest}, named by {', '.join(labels[:8])}{more}: it {reason}"


VERBS = (
    Verb(
        "backup",
        "Copy adapters, tenants, hashed keys, usage and audit log into a folder, beside a running server.",
        (
            "backup --to backup-2026-01-31 --store /srv/lora_serve",
            "backup --to backup --redis-url redis://redis:6379/0",
        ),
        _backup_flags,
        _backup,
    ),
    Verb(
        "restore",
        "Make a store folder, or the registry in an empty Redis, from a backup.",
        (
            "restore --from backup-2026-01-31 --store /srv/restored",
            "restore --from backup --redis-url redis://redis:6379/0",
        ),
        _restore_flags,
        _restore,
    ),
)
