"""Which tenants an adapter is shared with: kept over restarts and transfers, and read from older records."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import VersionEntry, document_of, entry_of
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.maintenance.transfer import MergeOutcome, merge
from lora_serve.core.errors import AdapterNotFoundError, InvalidRequestError


def version(letter: str) -> VersionEntry:
    return VersionEntry(0, f"sha256:{letter * 64}", 4, 10, {}, "test", 1.0)


def test_sharing_outlives_a_restart_and_goes_with_the_adapter(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path / "one")
    Registration(id="acme/a").commit(catalog.ledger, version("a"))
    catalog.set_sharing("acme/a", ["globex", "initech", "acme"])
    catalog.close()
    again, other = open_catalog(tmp_path / "one"), open_catalog(tmp_path / "other")
    try:
        entry = again.entry("acme/a")
        assert entry.shared_with == ("globex", "initech")
        assert again.resolve("acme/a", "globex").ref.digest == version("a").digest
        with pytest.raises(AdapterNotFoundError):
            again.resolve("acme/a", "hooli")
        merged = merge(other.snapshot, entry, {}, overwrite=False)
        assert merged.outcome is MergeOutcome.MADE
        other.ledger.change(lambda state: (merged.changes, None))
        assert other.entry("acme/a") == entry
    finally:
        again.close()
        other.close()


def test_adapter_is_shared_with_names_of_tenants_or_with_all(tmp_path: Path) -> None:
    with closing(open_catalog(tmp_path)) as catalog:
        Registration(id="acme/a").commit(catalog.ledger, version("a"))
        assert catalog.set_sharing("acme/a", ["*"]).shared_with == ("*",)
        for name in ("", "!", "**", "../acme", "acme corp"):
            with pytest.raises(InvalidRequestError):
                catalog.set_sharing("acme/a", ["globex", name])
        assert catalog.entry("acme/a").shared_with == ("*",)


def test_record_without_sharing_is_what_older_servers_write_and_read(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    Registration(id="acme/a").commit(catalog.ledger, version("a"))
    entry = catalog.entry("acme/a")
    assert "shared_with" not in json.loads(document_of(entry))
    assert entry_of(document_of(entry)) == entry
    fields = json.loads(document_of(entry)) | {"shared_with": "globex"}
    assert entry_of(json.dumps(fields)) is None
    catalog.close()


def test_tenant_leaves_in_one_commit_and_common_content_stays(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    for name, letter in (("acme/a", "a"), ("globex/a", "a"), ("globex/b", "b")):
        Registration(id=name).commit(catalog.ledger, version(letter))
    catalog.set_alias("live", "globex/b")
    catalog.set_sharing("acme/a", ["globex"])
    before = catalog.snapshot.position.generation
    removal = catalog.remove_tenant("globex")
    assert (removal.names, removal.strays) == (("globex/a", "globex/b"), (version("b").digest,))
    assert catalog.snapshot.position.generation == before + 1
    assert (list(catalog.snapshot.entries), dict(catalog.snapshot.aliases)) == (["acme/a"], {})
    assert catalog.entry("acme/a").shared_with == ()
    assert catalog.leases.drain_holder in catalog.ledger.state.leases[version("b").digest].holders
    catalog.close()
