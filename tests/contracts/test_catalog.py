"""What every catalog must do, wherever its records are kept: embedded in the store, or shared through Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import Canary, Route
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.catalog.state import LEASE_SECONDS
from lora_serve.core.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    ConflictError,
    InvalidRequestError,
    QuotaExceededError,
)
from lora_serve.core.tenant import Quota
from tests.catalog_versions import digest, lose_answers, version

Reopen = Callable[[], Catalog]


@pytest.fixture(params=["embedded", "shared"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Opens the catalog of the test's one server, after closing it if it is open."""
    url = request.getfixturevalue("redis_url") if request.param == "shared" else None
    opened: list[Catalog] = []

    def open_again() -> Catalog:
        for catalog in opened:
            catalog.close()
        opened[:] = [open_catalog(tmp_path / "store", url)]
        return opened[0]

    yield open_again
    for catalog in opened:
        catalog.close()


@pytest.fixture
def catalog(reopen: Reopen) -> Catalog:
    return reopen()


def test_new_content_is_a_new_version_and_becomes_what_the_id_means(catalog: Catalog) -> None:
    first, _, first_is_new = Registration(id="acme/support").commit(catalog.ledger, version("a"))
    second, _, second_is_new = Registration(id="acme/support").commit(catalog.ledger, version("b"))
    assert (first_is_new, second_is_new) == (True, True)
    assert [v.version for v in second.versions] == [1, 2]
    assert first.ref().label == "acme/support@1"
    assert catalog.resolve("acme/support").ref.digest == digest("b")
    assert catalog.resolve("acme/support@1").ref.digest == digest("a")
    assert catalog.resolve(f"acme/support@{digest('a')}").ref.version == 1


def test_same_content_under_the_same_id_is_the_same_version(catalog: Catalog) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    Registration(id="a").commit(catalog.ledger, version("b"))
    entry, _, is_new = Registration(id="a").commit(catalog.ledger, version("a"))
    assert not is_new
    assert [v.version for v in entry.versions] == [1, 2]
    assert catalog.resolve("a").ref.version == 1  # what was sent last is what the id means


@pytest.mark.parametrize(
    "name",
    ["b", "a@2", "a@0", "a@01", "a@-1", "a@", "a@latest", "a@sha256:00", "a@1@1", "", "@1", "A", "a@" + "9" * 30],
)
def test_unknown_names_are_told_back_as_given(catalog: Catalog, name: str) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    with pytest.raises(AdapterNotFoundError) as caught:
        catalog.resolve(name)
    assert caught.value.name == name


def test_owner_is_given_or_the_first_part_of_the_id_or_default(catalog: Catalog) -> None:
    Registration(id="acme/support").commit(catalog.ledger, version("a"))
    Registration(id="plain").commit(catalog.ledger, version("a"))
    Registration(id="x/y", tenant="globex").commit(catalog.ledger, version("a"))
    assert [entry.tenant for entry in catalog.snapshot.page()] == ["acme", "default", "globex"]


def test_another_tenants_adapter_does_not_exist(catalog: Catalog) -> None:
    Registration(id="acme/support").commit(catalog.ledger, version("a"))
    assert catalog.resolve("acme/support", tenant="acme").ref.tenant == "acme"
    foreign, unknown = [], []
    for name, errors in (("acme/support", foreign), ("acme/nothing", unknown)):
        with pytest.raises(AdapterNotFoundError) as caught:
            catalog.resolve(name, tenant="globex")
        errors.append(str(caught.value).replace(name, "X"))
    assert foreign == unknown


def test_an_id_cannot_change_hands(catalog: Catalog) -> None:
    Registration(id="acme/support").commit(catalog.ledger, version("a"))
    with pytest.raises(ConflictError):
        Registration(id="acme/support", tenant="globex").commit(catalog.ledger, version("b"))
    assert catalog.resolve("acme/support").ref.digest == digest("a")


@pytest.mark.parametrize("name", ["", "../x", "a@1", "a:b", "a b", "a//b", "a/", "x" * 129])
def test_illegal_ids_are_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        Registration(id=name).commit(catalog.ledger, version("a"))


@pytest.mark.parametrize("metadata", [{"a": float("nan")}, {"a": object()}, {"a": "x" * 70000}])
def test_metadata_that_cannot_be_kept_is_refused(catalog: Catalog, metadata: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="metadata"):
        Registration(id="a", metadata=metadata).commit(catalog.ledger, version("a"))


def test_tenant_that_is_no_name_is_refused(catalog: Catalog) -> None:
    with pytest.raises(InvalidRequestError, match="tenant"):
        Registration(id="a", tenant="../x").commit(catalog.ledger, version("a"))


def test_pin_and_metadata_stay_when_a_new_version_says_nothing(catalog: Catalog) -> None:
    Registration(id="a", pin=True, metadata={"team": "x"}).commit(catalog.ledger, version("a"))
    entry, _, _ = Registration(id="a").commit(catalog.ledger, version("b"))
    assert (entry.pinned, entry.metadata) == (True, {"team": "x"})
    assert not catalog.set_pinned("a", False).pinned
    assert Registration(id="a", metadata={}).commit(catalog.ledger, version("c"))[0].metadata == {}


def test_removing_the_default_version_falls_back_to_the_newest_left(catalog: Catalog) -> None:
    for letter in "abc":
        Registration(id="a").commit(catalog.ledger, version(letter))
    assert catalog.remove("a", 3) == (digest("c"),)
    assert catalog.resolve("a").ref.version == 2
    assert catalog.remove("a", 1) == (digest("a"),)
    assert catalog.resolve("a").ref.version == 2
    assert catalog.remove("a", 2) == (digest("b"),)
    with pytest.raises(AdapterNotFoundError):
        catalog.resolve("a")


def test_version_numbers_are_not_given_twice(catalog: Catalog) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    Registration(id="a").commit(catalog.ledger, version("b"))
    catalog.remove("a", 2)
    assert Registration(id="a").commit(catalog.ledger, version("c"))[0].default_version == 3


def test_removing_tells_only_digests_that_no_other_id_names(catalog: Catalog) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    Registration(id="a").commit(catalog.ledger, version("b"))
    Registration(id="b").commit(catalog.ledger, version("a"))
    assert catalog.remove("a") == (digest("b"),)
    assert catalog.remove("b") == (digest("a"),)


@pytest.mark.parametrize(("name", "number"), [("b", None), ("a", 2)])
def test_removing_what_is_not_there_changes_nothing(catalog: Catalog, name: str, number: int | None) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    with pytest.raises(AdapterNotFoundError):
        catalog.remove(name, number)
    assert catalog.resolve("a").ref.version == 1


def test_lists_by_name_in_pages(catalog: Catalog) -> None:
    for number in range(7):
        Registration(id=f"acme/{number}").commit(catalog.ledger, version("a"))
        Registration(id=f"globex/{number}").commit(catalog.ledger, version("a"))
    first = catalog.snapshot.page(tenant="acme", limit=4)
    rest = catalog.snapshot.page(tenant="acme", after=first[-1].name, limit=4)
    assert [entry.name for entry in (*first, *rest)] == [f"acme/{number}" for number in range(7)]
    assert catalog.snapshot.page(after="zzz") == ()
    assert len(catalog.snapshot.page()) == 14


def test_everything_is_there_again_after_a_restart(catalog: Catalog, reopen: Reopen) -> None:
    Registration(id="a", pin=True, metadata={"x": [1, "é"]}).commit(catalog.ledger, version("a"))
    Registration(id="a").commit(catalog.ledger, version("b"))
    Registration(id="c", tenant="t").commit(catalog.ledger, version("a"))
    catalog.remove("a", 2)
    before = catalog.snapshot
    catalog = reopen()
    assert catalog.snapshot == before
    assert catalog.leases.expired(catalog.ledger.state) == [(digest("b"), catalog.leases.drain_holder)]
    assert Registration(id="a").commit(catalog.ledger, version("d"))[0].default_version == 3


def test_blob_is_condemned_once_nobody_names_or_holds_it(catalog: Catalog) -> None:
    first, second = catalog.leases.acquire(digest("a")), catalog.leases.acquire(digest("a"))
    assert not catalog.leases.release(digest("a"), first)
    assert catalog.leases.release(digest("a"), second)
    with pytest.raises(AdapterUnavailableError, match="being deleted"):
        catalog.leases.acquire(digest("a"))
    catalog.leases.deleted(digest("a"))
    Registration(id="a").commit(catalog.ledger, version("a"), holder=catalog.leases.acquire(digest("a")))
    assert not catalog.leases.release(digest("a"), catalog.leases.acquire(digest("a")))
    assert catalog.remove("a") == (digest("a"),)
    assert catalog.leases.release(digest("a"), catalog.leases.drain_holder)


def test_deletion_that_was_given_up_bars_nobody_from_the_same_content(catalog: Catalog, reopen: Reopen) -> None:
    assert catalog.leases.release(digest("a"), catalog.leases.acquire(digest("a")))
    catalog.leases.deletion_failed(digest("a"))
    Registration(id="a").commit(catalog.ledger, version("a"), holder=catalog.leases.acquire(digest("a")))
    assert catalog.remove("a") == (digest("a"),)
    assert catalog.leases.release(digest("a"), catalog.leases.drain_holder)  # what was left over goes with it
    catalog.leases.deletion_failed(digest("a"))
    catalog = reopen()
    assert catalog.leases.expired(catalog.ledger.state) == [(digest("a"), catalog.leases.drain_holder)]


def test_deletion_that_was_given_up_while_nothing_could_be_written_bars_nobody_either(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AdapterUnavailableError("injected")

    assert catalog.leases.release(digest("a"), catalog.leases.acquire(digest("a")))
    with monkeypatch.context() as patch:
        patch.setattr(catalog.ledger.journal, "commit", broken)
        catalog.leases.deletion_failed(digest("a"))
    Registration(id="a").commit(catalog.ledger, version("a"), holder=catalog.leases.acquire(digest("a")))


def test_replica_that_died_while_it_deleted_bars_the_same_content_for_as_long_as_leases_last(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, now = Catalog(catalog.ledger.journal, "dying"), time.time()
    assert dying.leases.release(digest("a"), dying.leases.acquire(digest("a")))
    catalog.refresh()
    monkeypatch.setattr(time, "time", lambda: now + LEASE_SECONDS - 60)
    with pytest.raises(AdapterUnavailableError, match="being deleted"):
        catalog.leases.acquire(digest("a"), wait_seconds=0)
    monkeypatch.setattr(time, "time", lambda: now + LEASE_SECONDS + 60)
    Registration(id="a").commit(catalog.ledger, version("a"), holder=catalog.leases.acquire(digest("a")))
    assert catalog.remove("a") == (digest("a"),)
    assert catalog.leases.release(digest("a"), catalog.leases.drain_holder)


def test_holds_of_an_earlier_life_are_found_again_and_those_of_this_one_are_not(
    catalog: Catalog, reopen: Reopen
) -> None:
    first, second = catalog.leases.acquire(digest("a")), catalog.leases.acquire(digest("a"))
    catalog.leases.drain(digest("b"))
    assert catalog.leases.release(digest("c"), catalog.leases.acquire(digest("c")))
    catalog = reopen()
    catalog.leases.acquire(digest("d"))
    left, drain = catalog.leases.expired(catalog.ledger.state), catalog.leases.drain_holder
    assert set(left) == {(digest("a"), first), (digest("a"), second), (digest("b"), drain), (digest("c"), drain)}
    freed = [one for one, holder in left if catalog.leases.release(one, holder)]
    assert sorted(freed) == [digest("a"), digest("b"), digest("c")]
    for one in freed:
        catalog.leases.deleted(one)
    assert catalog.leases.expired(catalog.ledger.state) == []


def test_end_of_a_registration_frees_no_blob_that_rows_still_use(catalog: Catalog) -> None:
    catalog.leases.drain(digest("a"))
    holder = catalog.leases.acquire(digest("a"))
    for _ in range(2):  # again if an answer was lost
        assert not catalog.leases.release(digest("a"), holder)
    assert catalog.leases.release(digest("a"), catalog.leases.drain_holder)


def test_version_whose_blob_went_when_its_lease_ran_out_is_not_named(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was set, or the machine slept, between the lease and the commit."""
    Registration(id="a").commit(catalog.ledger, version("a"))
    catalog.remove("a")
    late = catalog.leases.acquire(digest("a"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + LEASE_SECONDS + 1)
    assert catalog.leases.release(digest("a"), catalog.leases.drain_holder)
    for step in (lambda: None, lambda: catalog.leases.deleted(digest("a"))):
        step()
        with pytest.raises(AdapterUnavailableError, match="try again"):
            Registration(id="b").commit(catalog.ledger, version("a"), holder=late)
    assert catalog.snapshot.page() == ()
    Registration(id="c").commit(catalog.ledger, version("a"), holder=catalog.leases.acquire(digest("a")))
    assert Registration(id="b").commit(catalog.ledger, version("a"), holder=late)[2], "somebody else's name has kept it"


def test_blob_whose_condemnation_was_committed_and_not_heard_of_is_condemned_by_the_next_try(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = catalog.leases.acquire(digest("a"))
    with monkeypatch.context() as patched:
        lose_answers(catalog, patched)
        with pytest.raises(AdapterUnavailableError, match="lost"):
            catalog.leases.release(digest("a"), holder)
    assert catalog.leases.release(digest("a"), holder)
    for other in (holder, catalog.leases.drain_holder):
        assert not catalog.leases.release(digest("a"), other), "it is being deleted already"
    catalog.leases.deleted(digest("a"))
    assert not catalog.ledger.state.leases


def test_nobody_leases_a_blob_at_the_moment_in_which_it_is_condemned(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(set[str]):
        def add(self, one: str) -> None:
            time.sleep(0.1)
            super().add(one)

    refused: list[Exception] = []

    def lease() -> None:
        try:
            catalog.leases.acquire(digest("a"), wait_seconds=0)
        except AdapterUnavailableError as error:
            refused.append(error)

    holder, thread = catalog.leases.acquire(digest("a")), threading.Thread(target=lease)
    monkeypatch.setattr(catalog.leases, "_deleting", Slow())
    catalog.ledger.listen(thread.start)
    assert catalog.leases.release(digest("a"), holder)
    catalog.ledger.unlisten(thread.start)
    thread.join()
    assert len(refused) == 1


def test_version_that_is_not_activated_waits_beside_what_the_id_means(catalog: Catalog) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    entry, added, is_new = Registration(id="a", activate=False).commit(catalog.ledger, version("b"))
    assert (added.version, is_new, entry.default_version) == (2, True, 1)
    assert catalog.resolve("a").ref.version == 1
    assert catalog.resolve("a@2").ref.digest == digest("b")


def test_route_moves_and_one_call_brings_the_version_before_back(catalog: Catalog) -> None:
    for letter in "abc":
        Registration(id="a").commit(catalog.ledger, version(letter))
    assert catalog.entry("a").history == (1, 2)
    catalog.set_route("a", 1, None)
    assert (catalog.resolve("a").ref.version, catalog.entry("a").history) == (1, (2, 3))
    catalog.roll_back("a")
    assert catalog.resolve("a").ref.version == 3
    catalog.roll_back("a")
    assert catalog.resolve("a").ref.version == 2
    with pytest.raises(ConflictError, match="no version to go back to"):
        catalog.roll_back("a")


def test_rolling_back_during_a_canary_ends_the_canary_only(catalog: Catalog) -> None:
    for letter in "ab":
        Registration(id="a", activate=letter == "a").commit(catalog.ledger, version(letter))
    catalog.set_route("a", None, Canary(2, 100.0))
    assert catalog.resolve("a", sticky_key="x").ref.version == 2
    assert catalog.resolve("a").ref.version == 1  # nobody in particular asks
    catalog.roll_back("a")
    assert catalog.resolve("a", sticky_key="x").ref.version == 1


@pytest.mark.parametrize(("number", "canary"), [(3, None), (None, Canary(3, 1.0)), (1, Canary(1, 1.0))])
def test_route_to_nowhere_is_refused(catalog: Catalog, number: int | None, canary: Canary | None) -> None:
    for letter in "ab":
        Registration(id="a").commit(catalog.ledger, version(letter))
    with pytest.raises(InvalidRequestError):
        catalog.set_route("a", number, canary)
    assert catalog.entry("a").route == Route(2, None, (1,))


def test_removed_versions_leave_route_and_history(catalog: Catalog) -> None:
    for letter in "abcd":
        Registration(id="a").commit(catalog.ledger, version(letter))
    catalog.set_route("a", 3, Canary(2, 10.0))
    assert catalog.entry("a").history == (1, 2, 4)
    catalog.remove("a", 2)
    assert catalog.entry("a").route == Route(3, None, (1, 4))
    catalog.remove("a", 3)
    assert catalog.entry("a").route == Route(4, None, (1,))


def test_alias_leads_to_an_id_or_to_one_version(catalog: Catalog) -> None:
    for letter in "ab":
        Registration(id="acme/a").commit(catalog.ledger, version(letter))
    catalog.set_alias("acme/live", "acme/a")
    catalog.set_alias("acme/old", "acme/a@1")
    assert catalog.resolve("acme/live").ref.version == 2
    assert catalog.resolve("acme/live@1").ref.version == 1
    assert catalog.resolve("acme/old").ref.version == 1
    assert tuple(catalog.snapshot.aliases_of("acme/a")) == ("acme/live", "acme/old")
    for name, tenant in (("acme/old@2", None), ("acme/live@3", None), ("acme/live", "globex")):
        with pytest.raises(AdapterNotFoundError):
            catalog.resolve(name, tenant=tenant)
    catalog.set_alias("acme/old", "acme/a@2")
    assert catalog.resolve("acme/old").ref.version == 2


def test_alias_and_id_cannot_share_a_name_and_an_alias_of_nothing_is_refused(catalog: Catalog) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    catalog.set_alias("b", "a")
    with pytest.raises(ConflictError):
        catalog.set_alias("a", "a")
    with pytest.raises(ConflictError):
        Registration(id="b").commit(catalog.ledger, version("b"))
    for target in ("b", "x", "a@2"):
        with pytest.raises(AdapterNotFoundError):
            catalog.set_alias("c", target)
    with pytest.raises(InvalidRequestError):
        catalog.set_alias("a@1", "a")


def test_aliases_of_what_is_removed_go_with_it(catalog: Catalog) -> None:
    for letter in "ab":
        Registration(id="a").commit(catalog.ledger, version(letter))
    for alias, target in (("x", "a"), ("y", "a@1"), ("z", "a@2")):
        catalog.set_alias(alias, target)
    catalog.remove("a", 1)
    assert catalog.snapshot.aliases == {"x": "a", "z": "a@2"}
    catalog.remove_alias("z")
    with pytest.raises(AdapterNotFoundError):
        catalog.remove_alias("z")
    catalog.remove("a")
    assert catalog.snapshot.aliases == {}


def test_readers_on_other_threads_always_see_whole_states(catalog: Catalog) -> None:
    torn: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            snapshot = catalog.snapshot
            named = {version.digest for entry in snapshot.entries.values() for version in entry.versions}
            if snapshot.digests != named or snapshot.names != tuple(sorted(snapshot.entries)):
                torn.append(snapshot)
            torn.extend(entry for entry in catalog.snapshot.page() if entry.default not in entry.versions)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        Registration(id=f"a{number % 3}").commit(catalog.ledger, version("a"))
        newest = Registration(id=f"a{number % 3}").commit(catalog.ledger, version("b"))[0].default_version
        catalog.remove(f"a{number % 3}", newest if number % 2 else None)
    done.set()
    reader.join()
    assert torn == []


def test_owner_has_no_more_adapters_or_bytes_than_its_quota(catalog: Catalog) -> None:
    quota = Quota(max_adapters=2, max_stored_bytes=3000)
    Registration(id="acme/a", quota=quota).commit(catalog.ledger, version("a"))
    Registration(id="acme/a", quota=quota).commit(catalog.ledger, version("b"))
    Registration(id="globex/a", quota=Quota(max_stored_bytes=1000)).commit(catalog.ledger, version("a"))
    Registration(id="acme/b", quota=quota).commit(
        catalog.ledger, version("a")
    )  # the same content again: charged in full
    with pytest.raises(QuotaExceededError, match="has 2 adapters"):
        Registration(id="acme/c", quota=quota).commit(catalog.ledger, version("c"))
    with pytest.raises(QuotaExceededError, match="has 3000 bytes"):
        Registration(id="acme/b", quota=quota).commit(catalog.ledger, version("c"))
    Registration(id="acme/a", quota=quota).commit(catalog.ledger, version("b"))
    assert sorted(catalog.snapshot.entries) == ["acme/a", "acme/b", "globex/a"]
    catalog.remove("acme/a", 1)
    Registration(id="acme/b", quota=quota).commit(catalog.ledger, version("c"))


def test_registrations_at_the_same_time_do_not_pass_a_quota_together(catalog: Catalog) -> None:
    outcomes: list[bool] = []

    def register(letter: str) -> None:
        try:
            Registration(id=f"acme/{letter}", quota=Quota(max_adapters=3)).commit(catalog.ledger, version(letter))
        except QuotaExceededError:
            outcomes.append(False)
        else:
            outcomes.append(True)

    threads = [threading.Thread(target=register, args=(letter,)) for letter in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 3 + [True] * 3
