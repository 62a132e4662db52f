"""Registries with blobs of a few bytes, in a folder or on a real redis-server, for tests of what moves them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import Canary, CatalogEntry, VersionEntry
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.maintenance.registries import OpenRegistry, RegistryAddress, open_registry
from lora_serve.adapters.maintenance.transfer import Transfer, TransferReport, open_ends
from lora_serve.adapters.stores.disk import is_sound
from tests.catalog_versions import held

Content = tuple[Mapping[str, CatalogEntry], Mapping[str, str]]


def at(target: str | Path, prefix: str = "lora_serve") -> RegistryAddress:
    return RegistryAddress(str(target), "--from", prefix)


def copy(source: str | Path, target: str | Path, overwrite: bool = False) -> TransferReport:
    with open_ends(at(source), at(target)) as (first, second):
        return Transfer(first, second, overwrite, lambda done, total: None).run()


def put(place: OpenRegistry, name: str, text: str, activate: bool = True, tenant: str | None = None) -> str:
    """Register a version whose files are made of `text`; its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "adapter_config.json").write_text(text)
        (folder / "adapter_model.safetensors").write_bytes(_weights(text.encode() * 1000))
        if "token" in text:
            (folder / "lora_serve_added_tokens.json").write_text(text)
        digest = adapter_digest(folder)
        place.store.put(digest, folder)
    version = VersionEntry(0, digest, 8, 1001 * len(text), {"r": 8}, "folder x", time.time())
    Registration(id=name, tenant=tenant, activate=activate).commit(place.catalog.ledger, version)
    return digest


def _weights(content: bytes) -> bytes:
    """A safetensors file of as many bytes, of which the last ones are the content's."""
    size = len(content) - 100
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode().ljust(92)
    return len(header).to_bytes(8, "little") + header + content[100:]


def fill(target: str | Path) -> None:
    """Three ids: one with all that an id can have, one of a tenant with a shared blob, one alone."""
    with open_registry(at(target), is_source=False) as place:
        for text in ("one", "two", "three"):
            put(place, "acme/x", text)
        remove(place, "acme/x", 2)
        put(place, "acme/x", "four, with a token", activate=False)
        catalog = place.catalog
        catalog.set_route("acme/x", None, Canary(4, 12.5))
        catalog.edit("acme/x", lambda entry: replace(entry, pinned=True, metadata={"run": [1, "ü"]}))
        catalog.set_alias("live", "acme/x")
        catalog.set_alias("first", "acme/x@1")
        put(place, "y", "one", tenant="globex")
        put(place, "initech/z", "five")


def remove(place: OpenRegistry, name: str, version: int | None = None) -> None:
    leases = place.catalog.leases
    for digest in place.catalog.remove(name, version):
        assert leases.release(digest, leases.drain_holder)
        place.store.delete(digest)
        leases.deleted(digest)


def content(target: str | Path) -> Content:
    """Entries and aliases; all blobs that they name are there and sound, no others, nothing half copied, no hold."""
    with open_registry(at(target), is_source=True) as place:
        check_whole(place)
        assert place.store.digests() == place.catalog.snapshot.digests
        assert held(place.catalog) == set()
        assert list(place.tmp.iterdir()) == []
        return content_of(place.catalog)


def content_of(catalog: Catalog) -> Content:
    return catalog.snapshot.entries, catalog.snapshot.aliases


def check_whole(place: OpenRegistry) -> None:
    for digest in place.catalog.snapshot.digests:
        with place.store.open(digest) as folder:
            assert is_sound(folder, digest)


def blob(store: Path, digest: str) -> Path:
    return store / "blobs" / digest.removeprefix("sha256:")


def corrupt(store: Path, digest: str) -> None:
    """One byte, in a file of its own: a hard link to it elsewhere stays sound."""
    path = blob(store, digest) / "adapter_model.safetensors"
    wrong = b"!" + path.read_bytes()[1:]
    path.unlink()
    path.write_bytes(wrong)
