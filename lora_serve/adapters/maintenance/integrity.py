"""Checks the records of a registry, and the blobs that they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.entry import CatalogEntry, check_metadata, check_sharing, check_tenant
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.adapters.maintenance.registries import OpenRegistry
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore, is_sound
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import AdapterUnavailableError, InvalidRequestError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


class NotCopyableError(Exception):
    """An id cannot be copied; the text says why."""


@dataclass(frozen=True, slots=True)
class BadBlob:
    """A named blob that cannot be served."""

    digest: str
    problem: str  # "missing" or "corrupt"
    labels: tuple[str, ...]  # the versions that name it, as `id@version`


@dataclass(frozen=True, slots=True)
class Inventory:
    """The content of a registry, in figures."""

    num_adapters: int
    num_versions: int
    num_aliases: int
    num_bytes: int  # of all distinct contents, as they are served
    num_blobs: int
    missing: tuple[str, ...]  # digests that a version names and the store lacks
    unnamed: tuple[str, ...]  # digests that the store has and no version names: being registered or removed
    aside: tuple[str, ...]  # digests of orphaned blobs, which the catalog did not know at some start


def check_entry(entry: CatalogEntry, aliases: Mapping[str, str]) -> None:
    """Raises NotCopyableError for an entry that no server has written."""
    try:
        for name in (entry.name, *aliases):
            check_adapter_id(name)
        check_tenant(entry.tenant)
        check_metadata(entry.metadata)
        check_sharing(entry.shared_with)
    except InvalidRequestError as error:
        raise NotCopyableError(f"its record is not sound: {error}") from None
    numbers = [version.version for version in entry.versions]
    if numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= entry.last_version:
        raise NotCopyableError("its record is not sound: the versions' numbers contradict each other")
    if bad := [version.digest for version in entry.versions if not _DIGEST.match(version.digest)]:
        raise NotCopyableError(f"its record is not sound: {bad[0][:80]!r} is no digest")


def is_readable(store: AdapterStore, digest: str) -> bool:
    """True if the store returns exactly what `digest` names. Raises AdapterUnavailableError if it is away."""
    try:
        with store.open(digest) as folder:
            return is_sound(folder, digest)
    except AdapterUnavailableError:
        store.has(digest)  # raises if it is the whole store that is away
        return False


def inventory_of(place: OpenRegistry) -> Inventory:
    """Count, and compare names, without reading a blob. Raises AdapterUnavailableError."""
    snapshot, store = place.catalog.snapshot, place.store
    kept = store.digests()
    sizes = snapshot.sizes
    return Inventory(
        len(snapshot.entries),
        sum(len(entry.versions) for entry in snapshot.entries.values()),
        len(snapshot.aliases),
        sum(sizes.values()),
        len(kept),
        tuple(sorted(digest for digest in sizes if digest not in kept or not store.has(digest))),
        tuple(sorted(kept - sizes.keys())),
        tuple(sorted({digest for digest, _ in store.orphans.all()})) if isinstance(store, DiskStore) else (),
    )


def bad_blobs(place: OpenRegistry, on_progress: Callable[[int, int], None]) -> Iterator[BadBlob]:
    """Read and verify every named blob; `on_progress`: bytes done, bytes in all.

    Raises AdapterUnavailableError.
    """
    sizes = place.catalog.snapshot.sizes
    done, total = 0, sum(sizes.values())
    for digest, num_bytes in sizes.items():
        if not (_DIGEST.match(digest) and is_readable(place.store, digest)):
            place.catalog.refresh()  # a server may have deleted it meanwhile
            if labels := labels_of(place.catalog.snapshot, digest):
                has = _DIGEST.match(digest) and place.store.has(digest)
                yield BadBlob(digest, "corrupt" if has else "missing", labels)
        done += num_bytes
        on_progress(done, total)


def labels_of(snapshot: Snapshot, digest: str) -> tuple[str, ...]:
    """The versions that name a digest, as `id@version`."""
    found = [entry.ref(version) for entry in snapshot.entries.values() for version in entry.versions
             if version.digest == digest]  # fmt: skip
    return tuple(f"{ref.name}@{ref.version}" for ref in found)
