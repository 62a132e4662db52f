from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lora_serve.adapters import regular_file
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.stores import files
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.disk_tables import is_record
from lora_serve.core.errors import AdapterUnavailableError

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "store")


def test_files_and_folders_are_their_owners_only(store: DiskStore, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    folder = make_adapter()
    store.put(adapter_digest(folder), folder)
    for path in (tmp_path / "store").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_stays_in_tmp(store: DiskStore, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    folder = make_adapter()
    digest = adapter_digest(folder)
    store.put(digest, folder)
    store.put(digest, folder)
    store.delete(digest)
    store.delete(digest)
    assert os.listdir(tmp_path / "store" / "tmp") == []


def test_without_hard_links_files_are_copied(
    store: DiskStore, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(files.os, "link", refuse)
    folder = make_adapter()
    digest = adapter_digest(folder)
    store.put(digest, folder)
    with store.open(digest) as blob:
        assert adapter_digest(blob) == digest


def test_everything_is_flushed_before_it_is_seen(
    store: DiskStore, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_adapter()
    digest = adapter_digest(folder)
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        steps.append("flush " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store.put(digest, folder)
    assert steps[:2] == ["flush adapter_config.json", "flush adapter_model.safetensors"]
    assert steps[3:] == ["rename", "flush blobs"]


def test_full_disk_is_told_and_leaves_nothing(
    store: DiskStore, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    folder = make_adapter()
    monkeypatch.setattr(files.os, "link", full)
    monkeypatch.setattr(regular_file, "copy_regular", full)
    with pytest.raises(AdapterUnavailableError, match="No space left") as caught:
        store.put(adapter_digest(folder), folder)
    assert str(tmp_path) not in str(caught.value)
    assert store.digests() == frozenset()
    assert os.listdir(tmp_path / "store" / "tmp") == []


def test_foreign_things_among_the_blobs_are_not_listed(store: DiskStore, tmp_path: Path) -> None:
    (tmp_path / "store" / "blobs" / "lost+found").mkdir()
    assert store.digests() == frozenset()


def test_a_blob_that_is_named_again_bears_no_trace_of_those_that_let_it_go(
    store: DiskStore, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    folder = make_adapter()
    digest = adapter_digest(folder)
    store.put(digest, folder)
    first, second = "1" * 32, "2" * 32

    def traces() -> list[str]:
        with store.open(digest) as blob:
            return sorted(path.name for path in blob.iterdir() if is_record(path.name))

    with store.staging({digest: {first: "{}"}}) as publish:
        publish()
    store.remove_record(digest, first, tombstone=True)
    assert traces() == [f"gone-{first}.json"]
    with store.staging({digest: {second: "{}"}}) as publish:
        publish()
    assert traces() == [f"named-{second}.json"]
