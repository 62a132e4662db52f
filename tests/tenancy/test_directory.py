"""The directory of tenants and keys, over a file and over a real Redis that two replicas share."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AuthenticationError, ConflictError, NotFoundError
from lora_serve.core.tenant import Quota, Role, Tenant
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.directory import KEPT, Directory, open_directory
from tests.redis_server import RedisServer


class Clock:
    """Unix seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "tenants.sqlite3"


@pytest.fixture
def directory(path: Path, clock: Clock) -> Iterator[Directory]:
    directory = Directory(SqliteJournal(path), clock)
    yield directory
    directory.close()


def test_what_was_acknowledged_is_there_after_a_restart(directory: Directory, path: Path, clock: Clock) -> None:
    quota = Quota(requests_per_minute=60, max_stored_bytes=10**9)
    directory.create_tenant("acme", quota, may_use_base=False)
    key, _ = directory.create_key("acme", Role.TENANT_ADMIN, "ci", clock.now + 60, Quota(max_running=2))
    directory.note_uses({key.id: clock.now})
    before = directory.snapshot
    directory.close()
    again = Directory(SqliteJournal(path), clock)
    try:
        assert again.snapshot.tenants == {"acme": Tenant("acme", quota, False, clock.now)} == before.tenants
        assert again.snapshot.keys == {key.id: key} == before.keys
        assert again.snapshot.last_used(key.id) == clock.now
    finally:
        again.close()


def test_secret_is_nowhere_in_the_store(directory: Directory, path: Path) -> None:
    directory.create_tenant("acme")
    key, secret = directory.create_key("acme", Role.INFERENCE)
    random_part = secret.rpartition(f"{key.id}-")[2].encode()
    for file in path.parent.iterdir():
        assert random_part not in file.read_bytes()


def test_key_opens_for_its_tenant_until_it_is_revoked(directory: Directory) -> None:
    directory.create_tenant("acme", Quota(max_running=3), may_use_base=False)
    key, secret = directory.create_key("acme", Role.INFERENCE, quota=Quota(max_running=1))
    table = KeyTable(directory)
    caller = table.caller(secret)
    assert (caller.tenant, caller.role, caller.key_id) == ("acme", Role.INFERENCE, key.id)
    assert (caller.quota.max_running, caller.key_quota.max_running) == (3, 1)
    assert not caller.may_use_base
    assert not caller.sees_all
    directory.revoke_key("acme", key.id)
    with pytest.raises(AuthenticationError, match="revoked"):
        table.caller(secret)


def test_key_of_the_role_admin_sees_all(directory: Directory) -> None:
    directory.create_tenant("operations", may_use_base=False)
    _, secret = directory.create_key("operations", Role.ADMIN)
    caller = KeyTable(directory).caller(secret)
    assert caller.sees_all
    assert caller.may_use_base


def test_key_expires_at_its_second(directory: Directory, clock: Clock) -> None:
    directory.create_tenant("acme")
    _, secret = directory.create_key("acme", Role.INFERENCE, expires=clock.now + 60)
    table = KeyTable(directory)
    clock.now += 59.9
    assert table.caller(secret).tenant == "acme"
    clock.now += 0.1
    with pytest.raises(AuthenticationError, match="expired"):
        table.caller(secret)


def test_only_whoever_has_the_secret_hears_that_a_key_was_revoked(directory: Directory) -> None:
    directory.create_tenant("acme")
    key, _ = directory.create_key("acme", Role.INFERENCE)
    directory.revoke_key("acme", key.id)
    table = KeyTable(directory)
    texts = set()
    for wrong in (f"ls-{key.id}-{'A' * 43}", f"ls-{'a' * 12}-{'A' * 43}", "nonsense"):
        with pytest.raises(AuthenticationError) as caught:
            table.caller(wrong)
        texts.add(str(caught.value))
    assert texts == {"The API key is not valid."}


def test_tenant_takes_its_keys_along_and_leaves_the_others(directory: Directory, clock: Clock) -> None:
    for name in ("acme", "globex"):
        directory.create_tenant(name)
    gone, secret = directory.create_key("acme", Role.INFERENCE)
    kept, other = directory.create_key("globex", Role.INFERENCE)
    directory.note_uses({gone.id: clock.now, kept.id: clock.now})
    assert directory.delete_tenant("acme")
    assert directory.snapshot.keys == {kept.id: kept}
    assert directory.snapshot.last_used(gone.id) is None
    assert directory.snapshot.last_used(kept.id) == clock.now
    table = KeyTable(directory)
    with pytest.raises(AuthenticationError):
        table.caller(secret)
    assert table.caller(other).tenant == "globex"
    assert not directory.delete_tenant("acme")


def test_tenant_made_again_does_not_get_the_old_keys(directory: Directory) -> None:
    directory.create_tenant("acme")
    _, secret = directory.create_key("acme", Role.INFERENCE)
    directory.delete_tenant("acme")
    directory.create_tenant("acme")
    with pytest.raises(AuthenticationError):
        KeyTable(directory).caller(secret)


def test_mistakes_are_refused(directory: Directory) -> None:
    directory.create_tenant("acme")
    directory.create_tenant("globex")
    key, _ = directory.create_key("acme", Role.INFERENCE)
    with pytest.raises(ConflictError):
        directory.create_tenant("acme")
    with pytest.raises(NotFoundError):
        directory.create_key("initech", Role.INFERENCE)
    with pytest.raises(NotFoundError):
        directory.revoke_key("globex", key.id)
    with pytest.raises(NotFoundError):
        directory.change_tenant("initech", lambda old: old)


def test_tenant_has_so_many_keys_and_dead_ones_do_not_count_and_revoked_ones_do_not_stay(
    directory: Directory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.tenancy.directory.MAX_KEYS", 2)
    directory.create_tenant("acme")
    first, _ = directory.create_key("acme", Role.INFERENCE)
    expiring, _ = directory.create_key("acme", Role.INFERENCE, expires=clock.now + 10)
    with pytest.raises(ConflictError, match="revoke"):
        directory.create_key("acme", Role.INFERENCE)
    directory.revoke_key("acme", first.id)
    third, _ = directory.create_key("acme", Role.INFERENCE)
    assert len(directory.snapshot.keys_of("acme")) == 3
    clock.now += KEPT + 11
    fourth, _ = directory.create_key("acme", Role.INFERENCE)
    assert {key.id for key in directory.snapshot.keys_of("acme")} == {expiring.id, third.id, fourth.id}


def test_key_opens_again_once_a_clock_that_was_ahead_is_right_again(directory: Directory, clock: Clock) -> None:
    directory.create_tenant("acme")
    _, secret = directory.create_key("acme", Role.INFERENCE, expires=clock.now + 90 * 86400.0)
    clock.now += 400 * 86400.0
    with pytest.raises(AuthenticationError, match="expired"):
        KeyTable(directory).caller(secret)
    directory.create_key("acme", Role.INFERENCE)
    clock.now -= 400 * 86400.0
    assert KeyTable(directory).caller(secret) is not None


def test_keys_that_are_made_and_revoked_in_turn_do_not_grow_the_directory(
    directory: Directory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.tenancy.directory.MAX_ENDED", 3)
    directory.create_tenant("acme")
    made = []
    for _ in range(8):
        key, secret = directory.create_key("acme", Role.TENANT_ADMIN)
        KeyTable(directory).caller(secret)
        directory.note_uses({key.id: clock.now})
        directory.revoke_key("acme", key.id)
        made.append(key.id)
        clock.now += 1
    last, _ = directory.create_key("acme", Role.TENANT_ADMIN)
    assert [key.id for key in directory.snapshot.keys_of("acme")] == [*made[-3:], last.id]
    assert sum(len(times) for times in directory.snapshot.used.values()) == 3


def test_uses_are_kept_in_memory_and_written_in_one_commit(directory: Directory, clock: Clock) -> None:
    directory.create_tenant("acme")
    made = [directory.create_key("acme", Role.INFERENCE) for _ in range(20)]
    table, before = KeyTable(directory), directory.snapshot.position.generation
    for _ in range(3):
        clock.now += 1
        for _, secret in made:
            table.caller(secret)
    assert directory.snapshot.position.generation == before
    assert all(table.last_used(key.id) == clock.now for key, _ in made)
    uses = table.take_uses()
    directory.note_uses(uses)
    assert directory.snapshot.position.generation == before + 1
    assert all(directory.snapshot.last_used(key.id) == clock.now for key, _ in made)
    directory.note_uses({made[0][0].id: clock.now - 5, "nobodysnames": clock.now})  # an older one, and nobody's
    assert directory.snapshot.position.generation == before + 1


def test_uses_that_could_not_be_written_are_not_lost(directory: Directory, clock: Clock) -> None:
    directory.create_tenant("acme")
    key, secret = directory.create_key("acme", Role.INFERENCE)
    table = KeyTable(directory)
    table.caller(secret)
    uses = table.take_uses()
    clock.now += 5
    table.give_back(uses)
    assert table.take_uses() == uses
    table.caller(secret)
    table.give_back(uses)
    assert table.last_used(key.id) == clock.now


BROKEN_KEYS: list[Callable[[dict[str, object]], object]] = [
    lambda key: "not json",
    lambda key: [],
    lambda key: key | {"id": "b" * 12},
    lambda key: key | {"role": "root"},
    lambda key: key | {"tenant": "../etc"},
    lambda key: key | {"digest": ""},
    lambda key: key | {"digest": None},
    lambda key: key | {"expires": "never"},
    lambda key: key | {"expires": 1e400},
    lambda key: key | {"revoked": True and "no"},
    lambda key: key | {"quota": {"max_running": -1}},
    lambda key: key | {"quota": {"max_running": "all"}},
    lambda key: key | {"quota": {"device_bytes_max": 2**64}},  # no engine in another process could be told
    lambda key: key | {"quota": None},
    lambda key: {name: item for name, item in key.items() if name != "expires"},
]


@pytest.mark.parametrize("broken", BROKEN_KEYS)
def test_key_record_that_makes_no_sense_opens_nothing(
    directory: Directory, broken: Callable[[dict[str, object]], object], caplog: pytest.LogCaptureFixture
) -> None:
    directory.create_tenant("acme")
    key, secret = directory.create_key("acme", Role.INFERENCE)
    _, other = directory.create_key("acme", Role.INFERENCE)
    made = broken(json.loads(json.dumps(dataclasses.asdict(key) | {"quota": {}})))
    text = made if isinstance(made, str) else json.dumps(made)
    directory.ledger.change(lambda state: ({f"key:{key.id}": text}, None))
    table = KeyTable(directory)
    with pytest.raises(AuthenticationError):
        table.caller(secret)
    assert table.caller(other).tenant == "acme"
    assert "left out" in caplog.text
    assert key.digest not in caplog.text


def test_tenants_of_earlier_versions_have_not_forbidden_neighbours(directory: Directory) -> None:
    directory.create_tenant("old")
    directory.create_tenant("shut", offload=False)
    record = dataclasses.asdict(directory.snapshot.tenant("old")) | {"quota": {}}
    del record["offload"]
    directory.ledger.change(lambda state: ({"tenant:old": json.dumps(record)}, None))
    assert [directory.may_leave(name) for name in ("old", "shut", "nobody")] == [True, False, True]


# -- two replicas --------------------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis", append_only=True)
    redis.start()
    yield redis
    redis.stop()


@pytest.fixture
def pair(redis: RedisServer, tmp_path: Path) -> Iterator[tuple[Directory, Directory]]:
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(
                open_directory(
                    AdapterConfig(
                        store=tmp_path / name,
                        redis_url=redis.url,
                        max_loras=4,
                        max_lora_rank=64,
                        adapter_host_memory=1,
                        max_upload_size=1,
                    )
                )
            )
            for name in "ab"
        )
        yield one, other


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> float:
    """Seconds until it was so."""
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < seconds, "it never came to be"
        threading.Event().wait(0.005)
    return time.monotonic() - started


def is_refused(directory: Directory, secret: str) -> bool:
    try:
        KeyTable(directory).caller(secret)
    except AuthenticationError:
        return True
    return False


def test_replicas_know_what_the_other_did_within_a_second(pair: tuple[Directory, Directory]) -> None:
    """The fastest of a few: on a loaded machine a second may pass in which nobody of us runs."""
    one, other = pair
    revoked, deleted = [], []
    for _ in range(4):
        one.create_tenant("acme")
        key, secret = one.create_key("acme", Role.INFERENCE)
        until(lambda key=key: key.id in other.snapshot.keys)  # type: ignore[misc]
        assert KeyTable(other).caller(secret).tenant == "acme"
        one.revoke_key("acme", key.id)
        revoked.append(until(lambda secret=secret: is_refused(other, secret)))  # type: ignore[misc]
        other.delete_tenant("acme")
        deleted.append(until(lambda: not one.snapshot.keys and not one.snapshot.tenants))
    assert (min(revoked) < 1.0, min(deleted) < 1.0) == (True, True), (revoked, deleted)


def test_edits_of_two_replicas_at_once_are_all_there(pair: tuple[Directory, Directory]) -> None:
    one, other = pair
    one.create_tenant("acme")
    until(lambda: "acme" in other.snapshot.tenants)
    made: list[str] = []

    def make(directory: Directory) -> None:
        made.extend(directory.create_key("acme", Role.INFERENCE)[0].id for _ in range(10))

    threads = [threading.Thread(target=make, args=(directory,)) for directory in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 20
    for directory in pair:
        until(lambda directory=directory: directory.snapshot.keys.keys() == set(made))  # type: ignore[misc]


def test_without_redis_keys_go_on_and_edits_are_refused_in_words(
    pair: tuple[Directory, Directory], redis: RedisServer, tmp_path: Path
) -> None:
    from lora_serve.core.errors import AdapterUnavailableError

    one, other = pair
    one.create_tenant("acme")
    key, secret = one.create_key("acme", Role.INFERENCE)
    until(lambda: key.id in other.snapshot.keys)
    redis.kill()
    until(lambda: one.ledger.is_away and other.ledger.is_away)
    assert KeyTable(other).caller(secret).tenant == "acme"
    with pytest.raises(AdapterUnavailableError, match="tenant directory"):
        one.revoke_key("acme", key.id)
    redis.start()
    until(lambda: not one.ledger.is_away and not other.ledger.is_away)
    one.revoke_key("acme", key.id)
    until(lambda: other.snapshot.keys[key.id].revoked is not None)


def test_replica_that_starts_without_redis_knows_what_it_knew(
    pair: tuple[Directory, Directory], redis: RedisServer, tmp_path: Path
) -> None:
    one, other = pair
    one.create_tenant("acme")
    key, secret = one.create_key("acme", Role.INFERENCE)
    until(lambda: key.id in other.snapshot.keys)
    redis.kill()
    other.close()
    with open_directory(
        AdapterConfig(
            store=tmp_path / "b",
            redis_url=redis.url,
            max_loras=4,
            max_lora_rank=64,
            adapter_host_memory=1,
            max_upload_size=1,
        )
    ) as again:
        assert KeyTable(again).caller(secret).tenant == "acme"
