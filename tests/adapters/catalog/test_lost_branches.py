"""A Redis that starts from an older state and goes on, while replicas that know more come back later: nothing that was
closed opens again, nothing that was registered is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import redis

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.journals.mirrored import MirroredJournal, open_mirror
from lora_serve.adapters.catalog.opening import open_catalog, redis_journal
from lora_serve.core.errors import AuthenticationError, ConflictError, LoraServeError, NotFoundError
from lora_serve.core.tenant import Role
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.directory import JOURNAL, TITLE, Directory, merge_branches
from tests.catalog_versions import digest, version
from tests.redis_server import RedisServer
from tests.tiers import mostly_nightly

SEEDS = pytest.mark.parametrize("seed", mostly_nightly(range(200), *range(10)))
OpenDirectory = Callable[[str], Directory]
OpenCatalog = Callable[[str], Catalog]


class Backup:
    """Redis as it was, to be started from again."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._kept = {key: client.dump(key) for key in client.scan_iter()}

    def restore(self) -> None:
        self._client.flushall()
        for key, content in self._kept.items():
            self._client.restore(key, 0, content)


@pytest.fixture
def client(redis_url: str, shared_redis: RedisServer) -> Iterator[redis.Redis]:
    with shared_redis.client() as client:
        yield client


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def directory(redis_url: str, tmp_path: Path, stack: ExitStack) -> OpenDirectory:
    """That of a replica, which keeps its copy in a folder of its own."""

    def opened(name: str) -> Directory:
        mirror = open_mirror(tmp_path / name / "mirror.sqlite3", TITLE)
        journal = MirroredJournal(redis_journal(redis_url, "t", JOURNAL, TITLE), mirror, merge_branches)
        return stack.enter_context(closing(Directory(journal)))

    return opened


@pytest.fixture
def catalog(redis_url: str, tmp_path: Path, stack: ExitStack) -> OpenCatalog:
    return lambda name: stack.enter_context(closing(open_catalog(tmp_path / name, redis_url, "t")))


def opens(directory: Directory, secret: str) -> bool:
    try:
        KeyTable(directory).caller(secret)
    except AuthenticationError:
        return False
    return True


@pytest.mark.parametrize("num_later", [0, 1, 2, 9])
def test_revoked_key_stays_revoked_when_the_first_to_come_back_had_missed_it(
    directory: OpenDirectory, client: redis.Redis, num_later: int
) -> None:
    """What was not promised: Redis is older, the replica that gives back what it knows first has missed the newest."""
    knowing, missing = directory("a"), directory("b")
    knowing.create_tenant("acme")
    key, secret = knowing.create_key("acme", Role.INFERENCE)
    old = Backup(client)
    knowing.create_tenant("later")
    missing.refresh()
    knowing.revoke_key("acme", key.id)
    _, kept_secret = knowing.create_key("acme", Role.INFERENCE)
    old.restore()
    missing.refresh()  # it was ahead of that state, and gives back what it knows
    assert opens(missing, secret), "it cannot know better"
    made = [missing.create_key("later", Role.INFERENCE)[1] for _ in range(num_later)]
    knowing.refresh()
    missing.refresh()
    for replica in (knowing, missing, directory("new")):
        assert not opens(replica, secret)
        assert opens(replica, kept_secret)
        assert all(opens(replica, other) for other in made)
    assert knowing.snapshot.keys == missing.snapshot.keys


@pytest.mark.parametrize("num_later", [1, 2, 9])
def test_nobody_noticed_and_the_branch_went_on_beyond_what_was_known(
    directory: OpenDirectory, client: redis.Redis, num_later: int
) -> None:
    """The replica that goes on had not heard of anything since, so that it gives nothing back."""
    knowing, missing = directory("a"), directory("b")
    knowing.create_tenant("acme")
    key, secret = knowing.create_key("acme", Role.INFERENCE)
    missing.refresh()
    old = Backup(client)
    knowing.revoke_key("acme", key.id)
    old.restore()
    made = [missing.create_key("acme", Role.INFERENCE)[1] for _ in range(num_later)]
    knowing.refresh()
    missing.refresh()
    for replica in (knowing, missing):
        assert not opens(replica, secret)
        assert all(opens(replica, other) for other in made)


def test_deleted_tenant_stays_deleted_though_the_branch_gave_it_another_key(
    directory: OpenDirectory, client: redis.Redis
) -> None:
    knowing, missing = directory("a"), directory("b")
    knowing.create_tenant("acme")
    _, secret = knowing.create_key("acme", Role.INFERENCE)
    missing.refresh()
    old = Backup(client)
    knowing.delete_tenant("acme")
    old.restore()
    _, other = missing.create_key("acme", Role.INFERENCE)
    missing.change_tenant("acme", lambda tenant: tenant)
    knowing.refresh()
    missing.refresh()
    knowing.create_tenant("acme")
    missing.refresh()
    for replica in (knowing, missing):
        assert not opens(replica, secret)
        assert not opens(replica, other)


def test_what_is_registered_on_either_branch_is_there_and_the_living_ones_route_holds(
    catalog: OpenCatalog, client: redis.Redis
) -> None:
    knowing, missing = catalog("a"), catalog("b")
    Registration(id="both").commit(knowing.ledger, version("0"))
    Registration(id="gone").commit(knowing.ledger, version("1"))
    missing.refresh()
    old = Backup(client)
    Registration(id="both").commit(knowing.ledger, version("a"))
    Registration(id="ours").commit(knowing.ledger, version("b"))
    knowing.remove("gone")
    old.restore()
    Registration(id="both").commit(missing.ledger, version("c"))
    Registration(id="theirs").commit(missing.ledger, version("d"))
    knowing.refresh()
    missing.refresh()
    assert knowing.snapshot.entries == missing.snapshot.entries
    assert set(knowing.snapshot.entries) == {"both", "ours", "theirs"}
    entry = knowing.entry("both")
    assert {v.digest: v.version for v in entry.versions} == {digest("0"): 1, digest("c"): 2, digest("a"): 3}
    assert entry.default.digest == digest("c")


def test_route_outlives_the_loss_of_the_names_of_commits_before_redis_is_set_back(
    catalog: OpenCatalog, client: redis.Redis
) -> None:
    one = catalog("a")
    Registration(id="x").commit(one.ledger, version("0"))
    old = Backup(client)
    Registration(id="x").commit(one.ledger, version("a"))
    client.delete("t:registry:heads")
    for lose in (lambda: None, old.restore):
        lose()
        one.ledger._away_since = 1.0  # as after any loss of the connection
        one.refresh()
    assert one.entry("x").default.digest == digest("a")


def test_route_outlives_the_loss_of_that_hash_and_of_the_copy_in_one_blow(
    catalog: OpenCatalog, client: redis.Redis, tmp_path: Path
) -> None:
    with closing(catalog("a")) as one:
        Registration(id="x").commit(one.ledger, version("0"))
        old = Backup(client)
        Registration(id="x").commit(one.ledger, version("a"))
    client.delete("t:registry:heads")
    for path in (tmp_path / "a").glob("mirror.sqlite3*"):
        path.unlink()
    catalog("a").close()
    old.restore()
    assert catalog("a").entry("x").default.digest == digest("a")


def test_records_that_vanish_without_a_commit_are_given_back(catalog: OpenCatalog, client: redis.Redis) -> None:
    one = catalog("a")
    Registration(id="x").commit(one.ledger, version("a"))
    client.delete("t:registry:records")
    again = catalog("b")
    assert not again.snapshot.entries
    one.ledger._away_since = 1.0  # as after any loss of the connection
    one.refresh()
    again.refresh()
    assert set(again.snapshot.entries) == {"x"}


@SEEDS
def test_whatever_is_lost_whenever_nothing_closed_opens_again(
    directory: OpenDirectory, client: redis.Redis, seed: int
) -> None:
    """Three replicas, a Redis that is set back at random, and acts that were acknowledged to somebody."""
    chance, names = random.Random(seed), ("a", "b", "c")
    replicas = [directory(name) for name in names]
    replicas[0].create_tenant("acme")
    alive: dict[str, tuple[str, int]] = {}  # secret -> key's id, who knows of it
    revoked: list[str] = []
    old = Backup(client)
    for _ in range(40):
        at = chance.choice(replicas)
        act = chance.choice(("create", "create", "revoke", "refresh", "refresh", "back up", "set back", "forget"))
        with suppress(NotFoundError, ConflictError):
            if act == "create":
                key, secret = at.create_key("acme", Role.INFERENCE)
                alive[secret] = (key.id, replicas.index(at))
            elif act == "revoke" and alive:
                secret = chance.choice(sorted(alive))
                at.revoke_key("acme", alive[secret][0])
                revoked.append(secret)
                del alive[secret]
            elif act == "refresh":
                at.refresh()
            elif act == "back up":
                old = Backup(client)
            elif act == "set back":
                old.restore()
            elif act == "forget":
                at.ledger.forget()
    for _ in range(2):
        for replica in replicas:
            replica.refresh()
    for replica in replicas:
        assert not [secret for secret in revoked if opens(replica, secret)]
    assert replicas[0].snapshot.keys == replicas[1].snapshot.keys == replicas[2].snapshot.keys


@SEEDS
def test_whatever_is_lost_whenever_everything_registered_is_there(
    catalog: OpenCatalog, client: redis.Redis, seed: int
) -> None:
    chance, letters = random.Random(seed), iter("0123456789abcdef" * 9)
    replicas = [catalog(name) for name in ("a", "b")]
    registered: dict[str, set[str]] = {"x0": {digest("f")}}
    Registration(id="x0").commit(replicas[0].ledger, version("f"))  # an emptied Redis is another story
    old = Backup(client)
    for number in range(30):
        at, name = chance.choice(replicas), f"x{chance.randrange(4)}"
        act = chance.choice(("add", "add", "add", "refresh", "refresh", "back up", "set back"))
        with suppress(LoraServeError):
            if act == "add":
                made = version(next(letters))
                Registration(id=name).commit(at.ledger, made)
                registered.setdefault(name, set()).add(made.digest)
            elif act == "refresh":
                at.refresh()
            elif act == "back up":
                old = Backup(client)
            elif number and act == "set back":
                old.restore()
    for _ in range(2):
        for replica in replicas:
            replica.refresh()
    assert replicas[0].snapshot.entries == replicas[1].snapshot.entries
    for name, digests in registered.items():
        assert digests <= {v.digest for v in replicas[0].entry(name).versions}
