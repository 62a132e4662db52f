"""A catalog whose connection to Redis breaks: what is done is done once, and what is said is true of now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.tenancy.directory import Directory, redis_journal
from tests.broken_network import BrokenNetwork
from tests.catalog_versions import digest, version
from tests.redis_server import RedisServer


@pytest.fixture
def network(redis_url: str, shared_redis: RedisServer) -> Iterator[BrokenNetwork]:
    with BrokenNetwork(shared_redis.port) as network:
        yield network


@pytest.fixture
def far(network: BrokenNetwork, tmp_path: Path) -> Iterator[Catalog]:
    """Behind the network, without a follower."""
    with closing(open_catalog(tmp_path / "far", f"redis://127.0.0.1:{network.port}/0")) as catalog:
        yield catalog


@pytest.fixture
def near(redis_url: str, tmp_path: Path) -> Iterator[Catalog]:
    with closing(open_catalog(tmp_path / "near", redis_url)) as catalog:
        yield catalog


def test_commit_whose_answer_was_lost_is_not_made_twice(far: Catalog, near: Catalog, network: BrokenNetwork) -> None:
    for text in "abc":
        Registration(id="acme/x").commit(far.ledger, version(text))
    network.lose_answer_to(b"EXEC")
    assert far.roll_back("acme/x").default_version == 2
    assert network.num_lost == 1
    near.refresh()
    assert near.entry("acme/x").default_version == 2


def test_lost_answers_are_those_of_the_first_attempt(far: Catalog, network: BrokenNetwork) -> None:
    """Where a second one would find the id gone, or the tenant there already."""
    Registration(id="acme/x").commit(far.ledger, version("a"))
    network.lose_answer_to(b"EXEC")
    assert far.remove("acme/x") == (digest("a"),)
    journal = redis_journal(f"redis://127.0.0.1:{network.port}/0", "lora_serve", "tenants", "directory")
    with closing(Directory(journal)) as directory:
        network.lose_answer_to(b"EXEC")
        assert directory.create_tenant("acme").name == "acme"
    assert network.num_lost == 2


def test_commit_whose_answer_was_lost_is_known_though_others_came_after(
    far: Catalog, near: Catalog, network: BrokenNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in "abc":
        Registration(id="acme/x").commit(far.ledger, version(text))
    shared = far.ledger.journal._shared  # type: ignore[attr-defined]
    attempt, attempts = shared._attempt, []

    def attempt_late(*arguments: object) -> object:
        attempts.append(arguments)
        if len(attempts) == 2:
            Registration(id="acme/y").commit(near.ledger, version("d"))
        return attempt(*arguments)

    near.refresh()
    monkeypatch.setattr(shared, "_attempt", attempt_late)
    network.lose_answer_to(b"EXEC")
    assert far.roll_back("acme/x").default_version == 2
    assert len(attempts) == 2
    far.refresh()
    assert far.entry("acme/x").default_version == 2
    assert "acme/y" in far.snapshot.entries


CHANGES: dict[str, tuple[Callable[[Catalog], object], Callable[[Catalog], object]]] = {
    "route": (lambda other: other.set_route("acme/x", 1, None), lambda one: one.set_route("acme/x", 2, None)),
    "pin": (lambda other: other.set_pinned("acme/x", True), lambda one: one.set_pinned("acme/x", False)),
    "sharing": (lambda other: other.set_sharing("acme/x", ["globex"]), lambda one: one.set_sharing("acme/x", [])),
    "metadata": (lambda other: other.set_metadata("acme/x", {"a": 1}), lambda one: one.set_metadata("acme/x", {})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_that_was_undone_elsewhere_a_moment_ago_is_made_again(far: Catalog, near: Catalog, name: str) -> None:
    """Where the own state, which is a moment old, says that there is nothing to do."""
    undo, change = CHANGES[name]
    for text in "ab":
        Registration(id="acme/x").commit(far.ledger, version(text))
    near.refresh()
    wanted = near.entry("acme/x")
    undo(near)
    change(far)
    near.refresh()
    found = near.entry("acme/x")
    assert (found.default_version, found.pinned, found.shared_with, found.metadata) == (
        wanted.default_version,
        wanted.pinned,
        wanted.shared_with,
        wanted.metadata,
    )


def test_nothing_to_do_is_not_said_of_a_registry_that_cannot_be_asked(far: Catalog, network: BrokenNetwork) -> None:
    Registration(id="acme/x").commit(far.ledger, version("a"))
    network.cut()
    with pytest.raises(AdapterUnavailableError):
        far.set_pinned("acme/x", False)
    network.mend()
    assert not far.set_pinned("acme/x", False).pinned


def test_commit_outlives_a_connection_that_breaks_twice(
    far: Catalog, network: BrokenNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = far.ledger.journal._shared  # type: ignore[attr-defined]
    write, writes = shared._write, []

    def cut_off_twice(*arguments: object) -> None:
        writes.append(arguments)
        if len(writes) <= 2:
            network.end_connections()
        write(*arguments)

    monkeypatch.setattr(shared, "_write", cut_off_twice)
    assert Registration(id="acme/x").commit(far.ledger, version("a"))[1].version == 1
    assert len(writes) == 3


def test_connection_that_breaks_at_every_commit_is_no_commit_of_another(
    far: Catalog, network: BrokenNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registration(id="acme/x").commit(far.ledger, version("a"))
    shared = far.ledger.journal._shared  # type: ignore[attr-defined]
    write = shared._write

    def cut_off(*arguments: object) -> None:
        network.end_connections()
        write(*arguments)

    monkeypatch.setattr(shared, "_write", cut_off)
    with pytest.raises(AdapterUnavailableError):
        Registration(id="acme/x").commit(far.ledger, version("b"))
    with ExitStack() as stack:
        stack.enter_context(monkeypatch.context()).setattr(shared, "_write", write)
        far.refresh()
        assert Registration(id="acme/x").commit(far.ledger, version("b"))[1].version == 2
