"""The local disk's bytes: as a cache of a far store, as the store of record, and what is set aside."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_serve.adapters.checkpoint import content as digest_module
from lora_serve.adapters.checkpoint.content import WEIGHTS_NAME, adapter_digest
from lora_serve.adapters.stores import disk, files
from lora_serve.adapters.stores.disk import MAX_QUARANTINED, DiskStore
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.errors import AdapterUnavailableError, PayloadTooLargeError

SIZE = 1002  # bytes of a folder of `make`


def make(folder: Path, number: int, size: int = 1000) -> str:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / WEIGHTS_NAME).write_bytes(number.to_bytes(2, "big") * (size // 2))
    return adapter_digest(folder)


@pytest.fixture
def digests(tmp_path: Path) -> list[str]:
    return [make(tmp_path / "made" / str(number), number) for number in range(6)]


@pytest.fixture
def far(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "far")


def cache(tmp_path: Path, num_blobs: int = 2) -> DiskStore:
    return DiskStore(tmp_path / "near", num_blobs * SIZE, is_cache=True)


def spoil(store: DiskStore, digest: str) -> None:
    file = store._blob(digest) / WEIGHTS_NAME
    file.unlink()  # it may be a link to the folder it was put from
    file.write_bytes(b"x" * 1000)


def used_bytes(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "near" / "blobs").rglob("*") if path.is_file())


def read(store: TieredStore, digest: str) -> None:
    with store.open(digest) as folder:
        assert adapter_digest(folder) == digest


# -- a cache -----------------------------------------------------------------------------------------------------


def test_cache_never_exceeds_its_budget_and_everything_can_still_be_had(
    tmp_path: Path, far: DiskStore, digests: list[str]
) -> None:
    near = cache(tmp_path)
    store = TieredStore(near, far)
    for number, digest in enumerate(digests):
        store.put(digest, tmp_path / "made" / str(number))
        assert used_bytes(tmp_path) <= 2 * SIZE
    for digest in digests * 2:
        read(store, digest)
        assert used_bytes(tmp_path) <= 2 * SIZE
    assert store.digests() == set(digests)
    stats = store.tiers()["disk"]
    assert (stats.num_items, stats.num_bytes, stats.budget_bytes) == (2, 2 * SIZE, 2 * SIZE)
    assert stats.eviction_reasons == {"capacity": stats.loads - 2}


def test_least_recently_read_blob_leaves(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    near = cache(tmp_path)
    store = TieredStore(near, far)
    for number in range(2):
        store.put(digests[number], tmp_path / "made" / str(number))
    read(store, digests[0])
    store.put(digests[2], tmp_path / "made" / "2")
    assert near.digests() == {digests[0], digests[2]}


def test_blob_that_is_being_read_stays_and_the_newcomer_is_served_from_afar(
    tmp_path: Path, far: DiskStore, digests: list[str]
) -> None:
    near = cache(tmp_path, num_blobs=1)
    store = TieredStore(near, far)
    for number in (0, 1):
        far.put(digests[number], tmp_path / "made" / str(number))
    with store.open(digests[0]) as folder:
        with store.open(digests[1]) as other:
            assert adapter_digest(other) == digests[1]
            assert other.is_relative_to(tmp_path / "far")
        assert adapter_digest(folder) == digests[0]
        assert near.digests() == {digests[0]}
    read(store, digests[1])
    assert near.digests() == {digests[1]}, "it is read no more, so it may leave"


def test_blob_larger_than_the_cache_is_served_from_afar(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    store = TieredStore(cache(tmp_path), far)
    large = make(tmp_path / "large", 9, 4000)
    store.put(digests[0], tmp_path / "made" / "0")
    store.put(large, tmp_path / "large")
    read(store, large)
    assert store.near.digests() == {digests[0]}, "nothing left for what could not come"


def test_table_is_found_again_after_a_restart(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    store = TieredStore(cache(tmp_path, 3), far)
    for number in range(3):
        store.put(digests[number], tmp_path / "made" / str(number))
        os.utime(store.near._blob(digests[number]), (1000 + number, 1000 + number))
    read(store, digests[0])
    again = TieredStore(cache(tmp_path, 3), far)
    assert again.tiers()["disk"].num_bytes == 3 * SIZE
    again.put(digests[3], tmp_path / "made" / "3")
    assert again.near.digests() == {digests[0], digests[2], digests[3]}, "the longest unused one leaves"


def test_smaller_budget_holds_from_the_start_on(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    store = TieredStore(cache(tmp_path, 4), far)
    for number in range(4):
        store.put(digests[number], tmp_path / "made" / str(number))
    again = cache(tmp_path, 1)
    assert again.tiers()["disk"].eviction_reasons == {"shrunk": 3}
    assert used_bytes(tmp_path) == SIZE


def test_many_threads_read_what_does_not_fit_together(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    store = TieredStore(cache(tmp_path), far)
    for number, digest in enumerate(digests):
        far.put(digest, tmp_path / "made" / str(number))
    failed: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for turn in range(12):
                read(store, digests[(start + turn * 5) % 6])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert used_bytes(tmp_path) <= 2 * SIZE
    assert store.tiers()["disk"].num_bytes == used_bytes(tmp_path)
    assert not store.near._table._held


def test_hits_misses_and_loads_of_both_tiers(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    store = TieredStore(cache(tmp_path), far)
    store.put(digests[0], tmp_path / "made" / "0")
    far.put(digests[1], tmp_path / "made" / "1")
    for digest in (digests[0], digests[1], digests[1]):
        read(store, digest)
    with pytest.raises(AdapterUnavailableError):
        read(store, "sha256:" + "0" * 64)
    near, away = store.tiers()["disk"], store.tiers()["redis"]
    assert (near.hits, near.misses, near.loads) == (2, 2, 2)
    assert (away.hits, away.misses, away.loads) == (1, 1, 1)
    assert near.load_seconds > 0
    assert away.num_bytes is None
    assert store.places_of(digests[1]) == ("redis", "disk")
    assert store.places_of(digests[2]) == ("redis",)


def test_disk_that_cannot_be_written_does_not_stop_reading(
    tmp_path: Path, far: DiskStore, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TieredStore(cache(tmp_path), far)
    far.put(digests[0], tmp_path / "made" / "0")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "link_or_copy", full)
    read(store, digests[0])
    assert store.tiers()["disk"].num_bytes == 0, "what was not written is not counted"


# -- the store of record -----------------------------------------------------------------------------------------


def test_store_of_record_refuses_before_anything_is_written(tmp_path: Path, digests: list[str]) -> None:
    store = DiskStore(tmp_path / "near", 2 * SIZE)
    for number in range(2):
        store.put(digests[number], tmp_path / "made" / str(number))
    before = sorted((tmp_path / "near").rglob("*"))
    with pytest.raises(PayloadTooLargeError, match=rf"needs {SIZE} bytes.*--adapter-disk-memory allows {2 * SIZE}"):
        store.put(digests[2], tmp_path / "made" / "2")
    assert sorted((tmp_path / "near").rglob("*")) == before
    store.put(digests[0], tmp_path / "made" / "0")  # it is there already
    store.delete(digests[0])
    store.put(digests[2], tmp_path / "made" / "2")
    assert store.digests() == {digests[1], digests[2]}


def test_bytes_that_a_sweep_freed_can_be_used(tmp_path: Path, digests: list[str]) -> None:
    store = DiskStore(tmp_path / "near", SIZE)
    store.put(digests[0], tmp_path / "made" / "0")
    DiskStore(tmp_path / "near").sweep(frozenset(), lambda *_: True)
    store.put(digests[1], tmp_path / "made" / "1")
    assert store.digests() == {digests[1]}


def test_failed_write_gives_its_bytes_back(tmp_path: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path / "near", SIZE)

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "link_or_copy", fail)
        with pytest.raises(AdapterUnavailableError):
            store.put(digests[0], tmp_path / "made" / "0")
    store.put(digests[1], tmp_path / "made" / "1")


def test_budget_holds_after_a_look_at_the_blobs_that_failed(
    tmp_path: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "near", 2 * SIZE)
    for number in range(2):
        store.put(digests[number], tmp_path / "made" / str(number))

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "is_record", fail)
        with pytest.raises(AdapterUnavailableError):
            store.put(digests[2], tmp_path / "made" / "2")  # no room: the table is made anew
    with pytest.raises(PayloadTooLargeError):
        store.put(digests[2], tmp_path / "made" / "2")
    assert store.tiers()["disk"].num_bytes == used_bytes(tmp_path) == 2 * SIZE


def test_smaller_budget_holds_after_an_eviction_that_failed(
    tmp_path: Path, far: DiskStore, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TieredStore(cache(tmp_path, 3), far)
    for number in range(3):
        store.put(digests[number], tmp_path / "made" / str(number))
    again = cache(tmp_path, 1)

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "scratch_folder", fail)
        with pytest.raises(AdapterUnavailableError):
            again.tiers()
    assert again.tiers()["disk"].num_bytes == used_bytes(tmp_path) == SIZE


# -- corrupt copies ----------------------------------------------------------------------------------------------


def test_corrupt_near_copy_is_set_aside_and_fetched_again(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    near = cache(tmp_path)
    store = TieredStore(near, far)
    store.put(digests[0], tmp_path / "made" / "0")
    spoil(near, digests[0])
    read(store, digests[0])
    (aside,) = (tmp_path / "near" / "quarantine").iterdir()
    assert (aside / WEIGHTS_NAME).read_bytes() == b"x" * 1000
    stats = store.tiers()["disk"]
    assert stats.eviction_reasons == {"corrupt": 1}
    assert (stats.num_items, stats.num_bytes, stats.misses) == (1, SIZE, 1)
    read(store, digests[0])
    assert store.tiers()["disk"].hits == 1


def test_corrupt_near_copy_is_never_served_even_if_the_far_store_is_away(
    tmp_path: Path, far: DiskStore, digests: list[str]
) -> None:
    near = cache(tmp_path)
    store = TieredStore(near, far)
    store.put(digests[0], tmp_path / "made" / "0")
    spoil(near, digests[0])
    far.delete(digests[0])
    with pytest.raises(AdapterUnavailableError, match="does not have"):
        read(store, digests[0])
    assert not near.has(digests[0])


def test_corrupt_far_copy_is_taken_out_and_can_be_registered_again(
    tmp_path: Path, far: DiskStore, digests: list[str]
) -> None:
    store = TieredStore(cache(tmp_path), far)
    far.put(digests[0], tmp_path / "made" / "0")
    spoil(far, digests[0])
    with pytest.raises(AdapterUnavailableError, match=r"is corrupt.*register the adapter again"):
        read(store, digests[0])
    assert not far.has(digests[0])
    assert not store.near.has(digests[0])
    assert store.tiers()["redis"].eviction_reasons == {"corrupt": 1}
    store.put(digests[0], tmp_path / "made" / "0")
    read(store, digests[0])


def test_one_bad_reading_does_not_condemn_a_sound_far_copy(
    tmp_path: Path, far: DiskStore, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_serve.adapters.stores import tiered

    store = TieredStore(cache(tmp_path), far)
    far.put(digests[0], tmp_path / "made" / "0")
    readings = iter(["sha256:" + "f" * 64])
    monkeypatch.setattr(tiered, "_digest_of", lambda folder: next(readings, None) or adapter_digest(folder))
    read(store, digests[0])
    assert far.has(digests[0])


def test_readings_that_differ_are_refused_but_the_far_copy_stays(
    tmp_path: Path, far: DiskStore, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_serve.adapters.stores import tiered

    store = TieredStore(cache(tmp_path), far)
    far.put(digests[0], tmp_path / "made" / "0")
    readings = iter(["sha256:" + "e" * 64, "sha256:" + "f" * 64])
    monkeypatch.setattr(tiered, "_digest_of", lambda folder: next(readings))
    with pytest.raises(AdapterUnavailableError, match="corrupt"):
        read(store, digests[0])
    assert far.has(digests[0]), "the fault may be this machine's"


def test_only_the_last_few_broken_blobs_are_kept(tmp_path: Path, far: DiskStore, digests: list[str]) -> None:
    near = cache(tmp_path)
    store = TieredStore(near, far)
    store.put(digests[0], tmp_path / "made" / "0")
    for _ in range(MAX_QUARANTINED + 3):
        spoil(near, digests[0])
        read(store, digests[0])
    assert len(list((tmp_path / "near" / "quarantine").iterdir())) == MAX_QUARANTINED


# -- files that cannot be read at present ------------------------------------------------------------------------


@contextmanager
def unreadable(below: Path, code: int) -> Iterator[None]:
    """Whoever reads a file's content there meets this error."""
    plain = digest_module.file_sha256

    def read(path: Path) -> bytes:
        if path.is_relative_to(below):
            raise OSError(code, os.strerror(code))
        return plain(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digest_module, "file_sha256", read)
        yield


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_far_copy_that_cannot_be_read_here_stays(tmp_path: Path, far: DiskStore, digests: list[str], code: int) -> None:
    store = TieredStore(cache(tmp_path), far)
    far.put(digests[0], tmp_path / "made" / "0")
    with unreadable(tmp_path / "far", code), pytest.raises(AdapterUnavailableError):
        read(store, digests[0])
    read(store, digests[0])
    assert store.tiers()["redis"].eviction_reasons == {}


def test_near_copy_that_cannot_be_read_is_passed_over_and_stays(
    tmp_path: Path, far: DiskStore, digests: list[str]
) -> None:
    store = TieredStore(cache(tmp_path), far)
    store.put(digests[0], tmp_path / "made" / "0")
    with unreadable(tmp_path / "near" / "blobs", errno.EIO), store.opened(digests[0]) as blob:
        assert blob.tier == "redis"
    far.delete(digests[0])
    read(store, digests[0])
    assert not (tmp_path / "near" / "quarantine").exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_blob_that_cannot_be_read_is_there_until_it_is_replaced(
    tmp_path: Path, digests: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "near", SIZE)
    store.put(digests[0], tmp_path / "made" / "0")
    with unreadable(tmp_path / "near" / "blobs", code):
        with monkeypatch.context() as full:
            full.setattr(disk, "link_or_copy", _no_room)
            with pytest.raises(AdapterUnavailableError):
                store.put(digests[0], tmp_path / "made" / "0")
        with store.open(digests[0]) as blob:
            before = (blob / WEIGHTS_NAME).stat()
        assert store.tiers()["disk"].num_bytes == used_bytes(tmp_path) == SIZE
        (tmp_path / "made" / "0" / WEIGHTS_NAME).unlink()
        make(tmp_path / "again", 0)
        store.put(digests[0], tmp_path / "again")
    with store.open(digests[0]) as blob:
        assert adapter_digest(blob) == digests[0]
        assert not os.path.samestat((blob / WEIGHTS_NAME).stat(), before)
    assert store.tiers()["disk"].num_bytes == used_bytes(tmp_path) == SIZE


def test_two_that_replace_a_broken_blob_set_no_sound_one_aside(
    tmp_path: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "near")
    store.put(digests[0], tmp_path / "made" / "0")
    spoil(store, digests[0])
    make(tmp_path / "again", 0)
    make(tmp_path / "meanwhile", 0)

    def link(source: Path, target: Path) -> None:
        with monkeypatch.context() as other:
            other.setattr(disk, "link_or_copy", files.link_or_copy)
            store.put(digests[0], tmp_path / "meanwhile")
        files.link_or_copy(source, target)

    with monkeypatch.context() as one:
        one.setattr(disk, "link_or_copy", link)
        store.put(digests[0], tmp_path / "again")
    assert len(list((tmp_path / "near" / "quarantine").iterdir())) == 1
    with store.open(digests[0]) as blob:
        assert adapter_digest(blob) == digests[0]
        assert os.path.samefile(blob / WEIGHTS_NAME, tmp_path / "meanwhile" / WEIGHTS_NAME)


def _no_room(source: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
