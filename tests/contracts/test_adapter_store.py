"""What every adapter store must do; each store inherits the class. Redis is a real server."""

from __future__ import annotations

import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.redis import CHUNK_BYTES, RedisStore
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.commands.server_process import free_port
from lora_serve.core.errors import AdapterUnavailableError, ConfigError

CONFIG, WEIGHTS, TOKENS = "adapter_config.json", "adapter_model.safetensors", "lora_serve_added_tokens.json"


def make_folder(folder: Path, content: bytes) -> str:
    """A folder with two files; its digest."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes(b"{}" + content[:10])
    (folder / WEIGHTS).write_bytes(content)
    (folder / "README.md").write_text("not part of it")
    return adapter_digest(folder)


def contents(store: AdapterStore, digest: str) -> dict[str, bytes]:
    with store.open(digest) as folder:
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def redis_store(redis_url: str) -> Iterator[RedisStore]:
    store = RedisStore(redis_url)
    yield store
    store.close()


class AdapterStoreContract(ABC):
    """Inherit it and give a `store` fixture."""

    @pytest.fixture
    @abstractmethod
    def store(self) -> AdapterStore: ...

    def test_added_tokens_are_kept_beside_the_two_files(self, store: AdapterStore, tmp_path: Path) -> None:
        plain = make_folder(tmp_path / "plain", b"weights")
        with_tokens = tmp_path / "tokens"
        make_folder(with_tokens, b"weights")
        (with_tokens / TOKENS).write_bytes(b"{}")
        digest = adapter_digest(with_tokens)
        assert digest != plain
        store.put(digest, with_tokens)
        store.put(plain, tmp_path / "plain")
        assert contents(store, digest) == {CONFIG: b"{}weights", WEIGHTS: b"weights", TOKENS: b"{}"}
        assert sorted(contents(store, plain)) == [CONFIG, WEIGHTS]

    def test_gives_back_what_was_put(self, store: AdapterStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"weights")
        store.put(digest, tmp_path / "a")
        assert contents(store, digest) == {CONFIG: b"{}weights", WEIGHTS: b"weights"}
        with store.open(digest) as folder:
            assert adapter_digest(folder) == digest

    @pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
    def test_files_of_any_size_come_back_whole(self, store: AdapterStore, tmp_path: Path, size: int) -> None:
        content = (b"0123456789abcde" * (size // 15 + 1))[:size]
        digest = make_folder(tmp_path / "a", content)
        store.put(digest, tmp_path / "a")
        assert contents(store, digest)[WEIGHTS] == content

    def test_knows_what_it_has(self, store: AdapterStore, tmp_path: Path) -> None:
        assert store.digests() == frozenset()
        digests = {make_folder(tmp_path / name, name.encode()) for name in "abc"}
        for name in "abc":
            store.put(adapter_digest(tmp_path / name), tmp_path / name)
        assert store.digests() == digests
        assert all(store.has(digest) for digest in digests)
        assert not store.has("sha256:" + "0" * 64)

    def test_outlives_the_folder_it_was_put_from(self, store: AdapterStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x")
        store.put(digest, tmp_path / "a")
        shutil.rmtree(tmp_path / "a")
        assert contents(store, digest)[WEIGHTS] == b"x"

    def test_putting_twice_changes_nothing(self, store: AdapterStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x")
        for _ in range(2):
            store.put(digest, tmp_path / "a")
        assert store.digests() == {digest}
        assert contents(store, digest)[WEIGHTS] == b"x"

    def test_deletes_the_one_that_is_named(self, store: AdapterStore, tmp_path: Path) -> None:
        first, second = make_folder(tmp_path / "a", b"x"), make_folder(tmp_path / "b", b"y")
        store.put(first, tmp_path / "a")
        store.put(second, tmp_path / "b")
        store.delete(first)
        assert store.digests() == {second}
        assert not store.has(first)
        with pytest.raises(AdapterUnavailableError), store.open(first):
            pass
        store.delete(first)
        store.put(first, tmp_path / "a")
        assert contents(store, first)[WEIGHTS] == b"x"

    def test_what_it_does_not_have_is_told(self, store: AdapterStore) -> None:
        with pytest.raises(AdapterUnavailableError, match="does not have"), store.open("sha256:" + "0" * 64):
            pass

    def test_several_threads_put_and_open_at_once(self, store: AdapterStore, tmp_path: Path) -> None:
        digests = [make_folder(tmp_path / str(i), bytes([i]) * 1000) for i in range(4)]
        failed: list[BaseException] = []

        def work(index: int) -> None:
            try:
                digest = digests[index % 4]
                store.put(digest, tmp_path / str(index % 4))
                assert contents(store, digest)[WEIGHTS] == bytes([index % 4]) * 1000
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert store.digests() == set(digests)


class TestDiskStore(AdapterStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> DiskStore:
        return DiskStore(tmp_path / "store")


class TestRedisStore(AdapterStoreContract):
    @pytest.fixture
    def store(self, redis_store: RedisStore) -> RedisStore:
        return redis_store

    def test_nothing_is_left_in_redis_after_a_deletion(self, store: RedisStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x" * (2 * CHUNK_BYTES))
        store.put(digest, tmp_path / "a")
        store.delete(digest)
        assert store._redis.dbsize() == 0

    @pytest.mark.parametrize("damaged", [b"", b"x" * (CHUNK_BYTES - 1), b"x" * (CHUNK_BYTES + 1)])
    def test_chunk_of_another_size_than_the_manifest_says_is_not_taken(
        self, store: RedisStore, tmp_path: Path, damaged: bytes
    ) -> None:
        digest = make_folder(tmp_path / "a", b"x" * (2 * CHUNK_BYTES))
        store.put(digest, tmp_path / "a")
        store._redis.set(store._key(digest, WEIGHTS, 0), damaged)
        with pytest.raises(AdapterUnavailableError, match="lost a part"):
            contents(store, digest)

    def test_half_written_blob_is_never_seen_and_expires(
        self, store: RedisStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digest = make_folder(tmp_path / "a", b"x" * (3 * CHUNK_BYTES))
        write = store._redis.set
        written = []

        def failing(key: str, value: bytes, **options: int) -> object:
            if len(written) == 2:
                raise redis.ConnectionError("gone")
            written.append(key)
            return write(key, value, **options)

        monkeypatch.setattr(store._redis, "set", failing)
        with pytest.raises(AdapterUnavailableError):
            store.put(digest, tmp_path / "a")
        monkeypatch.undo()
        assert not store.has(digest)
        assert store.digests() == frozenset()
        assert all(store._redis.ttl(key) > 0 for key in written)
        store.put(digest, tmp_path / "a")
        assert contents(store, digest)[WEIGHTS] == b"x" * (3 * CHUNK_BYTES)
        assert all(store._redis.ttl(key) == -1 for key in store._redis.scan_iter())

    def test_replica_that_dies_while_writing_what_is_there_takes_nothing_with_it(
        self, store: RedisStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digest = make_folder(tmp_path / "a", b"x")
        store.put(digest, tmp_path / "a")

        def dies(key: str) -> None:
            raise redis.ConnectionError("gone")

        with monkeypatch.context() as patch:
            patch.setattr(store._redis, "persist", dies)
            with pytest.raises(AdapterUnavailableError):
                store.put(digest, tmp_path / "a")
        assert all(store._redis.ttl(key) == -1 for key in store._redis.scan_iter())

    def test_chunk_evicted_by_redis_is_told_and_can_be_put_again(self, store: RedisStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x" * (3 * CHUNK_BYTES))
        store.put(digest, tmp_path / "a")
        store._redis.delete(store._key(digest, WEIGHTS, 1))
        with pytest.raises(AdapterUnavailableError), store.open(digest):
            pass
        store.put(digest, tmp_path / "a")
        assert len(contents(store, digest)[WEIGHTS]) == 3 * CHUNK_BYTES

    @pytest.mark.parametrize("lost", [None, "manifest"])
    def test_damaged_chunk_is_replaced_by_the_next_put(
        self, store: RedisStore, tmp_path: Path, lost: str | None
    ) -> None:
        digest = make_folder(tmp_path / "a", b"x" * (2 * CHUNK_BYTES))
        store.put(digest, tmp_path / "a")
        store._redis.set(store._key(digest, WEIGHTS, 1), b"y" * CHUNK_BYTES)
        if lost:
            store._redis.delete(store._key(digest, lost))
        store.put(digest, tmp_path / "a")
        assert contents(store, digest)[WEIGHTS] == b"x" * (2 * CHUNK_BYTES)
        assert all(store._redis.ttl(key) == -1 for key in store._redis.scan_iter())

    @pytest.mark.parametrize("text", [b"not json", b"[]", b'{"adapter_config.json": 1}', b"null"])
    def test_manifest_that_is_none_is_told(self, store: RedisStore, text: bytes) -> None:
        digest = "sha256:" + "1" * 64
        store._redis.set(store._key(digest, "manifest"), text)
        with pytest.raises(AdapterUnavailableError), store.open(digest):
            pass

    def test_server_that_is_away_is_told_without_its_password(self, tmp_path: Path) -> None:
        url = f"redis://:secret@127.0.0.1:{free_port()}/0"
        store = RedisStore(url, timeout=0.2)
        digest = make_folder(tmp_path / "a", b"x")
        for call in (store.digests, lambda: store.has(digest), lambda: store.put(digest, tmp_path / "a")):
            with pytest.raises(AdapterUnavailableError) as caught:
                call()
            assert "secret" not in str(caught.value)
        store.close()

    def test_fetched_files_lie_in_its_folder_and_elsewhere_if_there_is_no_room(
        self, store: RedisStore, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
        (tmp_path / "system").mkdir()
        digest = make_folder(tmp_path / "a", b"x")
        store.put(digest, tmp_path / "a")
        (tmp_path / "file").write_text("no folder can be made in it")
        for tmp, used in ((tmp_path / "mine", tmp_path / "mine"), (tmp_path / "file", tmp_path / "system")):
            with closing(RedisStore(redis_url, tmp=tmp)) as placed:
                with placed.open(digest) as folder:
                    assert folder.parent == used
                    assert adapter_digest(folder) == digest
                assert list(used.iterdir()) == []

    def test_url_that_is_none_is_a_wrong_setting(self) -> None:
        with pytest.raises(ConfigError, match="--redis-url"):
            RedisStore("http://localhost")


class TestTieredStore(AdapterStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path, redis_store: RedisStore) -> TieredStore:
        return TieredStore(DiskStore(tmp_path / "store"), redis_store)

    def test_both_tiers_get_what_is_put(self, store: TieredStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x")
        store.put(digest, tmp_path / "a")
        assert store.near.has(digest)
        assert store.far.has(digest)

    def test_what_another_replica_put_is_fetched_once(self, store: TieredStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x")
        store.far.put(digest, tmp_path / "a")
        assert store.has(digest)
        assert contents(store, digest)[WEIGHTS] == b"x"
        store.far.delete(digest)
        assert contents(store, digest)[WEIGHTS] == b"x"

    def test_broken_near_copy_is_fetched_again(self, store: TieredStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x" * 100)
        store.put(digest, tmp_path / "a")
        with store.near.open(digest) as folder:
            (folder / WEIGHTS).unlink()
            (folder / WEIGHTS).write_bytes(b"y" * 100)
        with store.open(digest) as folder:
            assert adapter_digest(folder) == digest

    def test_corrupt_far_copy_never_comes_near(self, store: TieredStore, tmp_path: Path) -> None:
        digest = make_folder(tmp_path / "a", b"x" * 100)
        far = store.far
        assert isinstance(far, RedisStore)
        far.put(digest, tmp_path / "a")
        far._redis.set(far._key(digest, WEIGHTS, 0), b"y" * 100)
        with pytest.raises(AdapterUnavailableError, match="corrupt"), store.open(digest):
            pass
        assert not store.near.has(digest)

    def test_near_copy_is_served_while_the_far_store_is_away(
        self, store: TieredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digest = make_folder(tmp_path / "a", b"x")
        store.put(digest, tmp_path / "a")

        def away(*args: object, **kwargs: object) -> None:
            raise redis.ConnectionError("gone")

        far = store.far
        assert isinstance(far, RedisStore)
        monkeypatch.setattr(far._redis, "execute_command", away)
        assert contents(store, digest)[WEIGHTS] == b"x"
        with pytest.raises(AdapterUnavailableError):
            store.delete(digest)
        assert store.near.has(digest)
