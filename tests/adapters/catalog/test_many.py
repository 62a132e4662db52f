"""A catalog of very many ids: commits that wait are made together, and none costs more the more ids there are."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.errors import QuotaExceededError, StoreUnwritableError
from lora_serve.core.tenant import Quota
from tests.catalog_versions import version as version_of_letter


def version(number: int) -> VersionEntry:
    return version_of_letter(f"{number:x}")


class HeldJournal(SqliteJournal):
    """Counts commits; the first waits until it is told to go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_commits, self.goes_on, self.has_begun = 0, threading.Event(), threading.Event()
        self.fits = 10**9  # records in one commit

    def commit(self, expected, changes, becomes=None, heads=None):  # type: ignore[no-untyped-def]
        self.num_commits += 1
        self.has_begun.set()
        assert self.goes_on.wait(10)
        if len(changes) > self.fits:
            raise StoreUnwritableError("full")
        return super().commit(expected, changes, becomes, heads)


def _added_together(journal: HeldJournal, catalog: Catalog, count: int, quota: Quota) -> list[object]:
    def add(number: int) -> object:
        try:
            return Registration(id=f"acme/a{number}", quota=quota).commit(catalog.ledger, version(number))[1].digest
        except QuotaExceededError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        first = pool.submit(add, 0)
        assert journal.has_begun.wait(10)
        others = [pool.submit(add, number) for number in range(1, count)]
        while len(catalog.ledger._waiting) < count:
            pass
        journal.goes_on.set()
        return [one.result() for one in (first, *others)]


@pytest.mark.parametrize("fits", [10**9, 2])
def test_commits_that_wait_are_made_together_and_each_has_its_own_end(tmp_path: Path, fits: int) -> None:
    journal = HeldJournal(tmp_path / "catalog.sqlite3")
    catalog = Catalog(journal, "here")
    journal.fits = fits
    found = _added_together(journal, catalog, 8, Quota(max_adapters=6))
    assert [str(one) for one in found[:1]] == [version(0).digest]
    assert sum(isinstance(one, QuotaExceededError) for one in found) == 2
    assert len(catalog.snapshot.entries) == 6
    # one before, one together; where that is too much for the disk, each alone
    assert journal.num_commits == (2 if fits > 2 else 2 + 5)
    catalog.close()
    with closing(open_catalog(tmp_path)) as again:
        assert {one.default.digest for one in again.snapshot.entries.values()} == {
            one for one in found if isinstance(one, str)
        }


def test_snapshot_after_changes_is_the_snapshot_of_all(tmp_path: Path) -> None:
    draw = random.Random(3)
    with closing(open_catalog(tmp_path)) as catalog:
        for step in range(60):
            name = f"acme/a{draw.randrange(8)}"
            before, known = catalog.snapshot, name in catalog.snapshot.entries
            if known and draw.random() < 0.4:
                catalog.remove(name)
            else:
                Registration(id=name, pin=draw.random() < 0.3).commit(catalog.ledger, version(draw.randrange(5)))
            now = catalog.snapshot
            whole = Snapshot.of(now.position, now.entries, now.aliases)
            assert (now.names, dict(now.named), now.pinned) == (whole.names, dict(whole.named), whole.pinned), step
            assert (now.num_gone > before.num_gone) == bool(before.digests - now.digests)


def test_lease_leaves_entries_and_names_as_they_are(tmp_path: Path) -> None:
    with closing(open_catalog(tmp_path)) as catalog:
        Registration(id="acme/a").commit(catalog.ledger, version(0))
        before: tuple[dict[str, CatalogEntry], ...] = (catalog.snapshot.entries, catalog.snapshot.names)  # type: ignore[assignment]
        catalog.leases.acquire(version(1).digest)
        assert (catalog.snapshot.entries, catalog.snapshot.names) == before
        assert catalog.snapshot.entries is before[0]
