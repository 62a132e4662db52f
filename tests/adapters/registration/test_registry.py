from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    ConflictError,
    InvalidAdapterError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from lora_serve.core.model_spec import ModelSpec
from tests.catalog_versions import held, lose_answers
from tests.fake_verifier import FakeVerifier
from tests.loading import fetch_adapter
from tests.verifying_registry import VerifyingRegistry

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter


@pytest.fixture
def registry(config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore) -> VerifyingRegistry:
    return VerifyingRegistry(config, spec, catalog, store, FakeVerifier())


def staged(registry: VerifyingRegistry, folder: Path) -> Path:
    upload = registry.new_folder()
    for path in folder.iterdir():
        shutil.copy(path, upload)
    return upload


def leftovers(config: AdapterConfig) -> list[str]:
    return os.listdir(config.store / "tmp")


def test_registered_folder_can_be_resolved_and_loaded(
    registry: VerifyingRegistry, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter, spec: ModelSpec
) -> None:
    folder = make_adapter(rank=4)
    done = registry.register_folder("acme/support", folder, pin=True, metadata={"team": "x"})
    assert done.created
    assert (done.ref.label, done.ref.tenant, done.ref.rank) == ("acme/support@1", "acme", 4)
    shutil.rmtree(folder)  # our copy is our own
    assert catalog.resolve("acme/support").ref == done.ref
    assert FakeVerifier().num_bytes(fetch_adapter(store, spec, done.ref)) == done.ref.num_bytes
    summary = catalog.entry("acme/support").default.summary
    assert (summary["r"], summary["targets"], summary["num_modules"]) == (4, ["down_proj", "q_proj"], 4)
    assert catalog.entry("acme/support").pinned


def test_same_content_again_is_not_created_again(registry: VerifyingRegistry, make_adapter: MakeAdapter) -> None:
    folder = make_adapter()
    first = registry.register_folder("a", folder)
    again = registry.register_folder("a", folder)
    assert (first.created, again.created) == (True, False)
    assert again.ref == first.ref


def test_new_content_under_an_old_id_is_the_next_version(
    registry: VerifyingRegistry, make_adapter: MakeAdapter
) -> None:
    registry.register_folder("a", make_adapter("one", seed=1))
    assert registry.register_folder("a", make_adapter("two", seed=2)).ref.version == 2


def test_upload_is_registered_and_its_folder_removed(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, config: AdapterConfig
) -> None:
    done = registry.register_staged("a", staged(registry, make_adapter()))
    assert done.entry.default.source == "upload"
    assert leftovers(config) == []


def test_refused_upload_leaves_nothing_behind(
    registry: VerifyingRegistry, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter, config: AdapterConfig
) -> None:
    with pytest.raises(InvalidAdapterError, match="layer replication"):
        registry.register_staged("a", staged(registry, make_adapter(settings={"layer_replication": [[0, 1]]})))
    with pytest.raises(InvalidRequestError):
        registry.register_staged("../a", staged(registry, make_adapter("other")))
    assert leftovers(config) == []
    assert store.digests() == frozenset()
    assert catalog.snapshot.page() == ()


def test_adapter_that_changes_nothing_can_be_allowed(registry: VerifyingRegistry, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(settings={"lora_alpha": 0})
    with pytest.raises(InvalidAdapterError, match="changes nothing"):
        registry.register_folder("a", folder)
    assert registry.register_folder("a", folder, allow_noop=True).created


def test_adapter_larger_than_host_memory_is_refused_at_the_door(
    config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter
) -> None:
    small = VerifyingRegistry(
        dataclasses.replace(config, adapter_host_memory=100), spec, catalog, store, FakeVerifier()
    )
    with pytest.raises(InvalidAdapterError, match="--adapter-host-memory allows 100"):
        small.register_folder("a", make_adapter())


def test_folder_larger_than_the_limit_is_refused(
    config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter
) -> None:
    small = VerifyingRegistry(dataclasses.replace(config, max_upload_size=1000), spec, catalog, store, FakeVerifier())
    with pytest.raises(PayloadTooLargeError):
        small.register_folder("a", make_adapter())
    assert leftovers(config) == []


def outside(root: Path, tmp_path: Path) -> dict[str, str | Path]:
    """Ways to name a folder that is not inside the root, or not there."""
    secret = tmp_path / "secret"
    shutil.copytree(root / "adapter", secret)
    (root / "link").symlink_to(secret)
    (root / "circle").symlink_to(root / "circle")
    (root / "file").write_text("")
    (tmp_path / "root-but-longer").mkdir()
    return {
        "another folder": secret,
        "up and out": root / ".." / "secret",
        "relative": "../secret",
        "through a link": root / "link",
        "not there": root / "nothing",
        "a circle of links": root / "circle",
        "a file": root / "file",
        "same beginning": tmp_path / "root-but-longer",
        "null byte": "adapter\0",
        "very long": "x" * 5000,
        "empty name of a root": "/",
    }


def test_outside_and_not_there_are_told_in_the_same_words(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, config: AdapterConfig, tmp_path: Path
) -> None:
    make_adapter("adapter")
    answers = set()
    for source in outside(config.adapter_root[0], tmp_path).values():
        with pytest.raises(InvalidRequestError) as caught:
            registry.register_folder("a", source)
        answers.add(str(caught.value).replace(repr(str(source)[:200]), "X"))
    assert answers == {"There is no folder X inside an allowed root (--adapter-root)."}


def test_without_roots_nothing_can_be_registered_by_path(
    config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter
) -> None:
    closed = VerifyingRegistry(dataclasses.replace(config, adapter_root=()), spec, catalog, store, FakeVerifier())
    folder = make_adapter()
    with pytest.raises(InvalidRequestError):
        closed.register_folder("a", folder)
    assert closed.register_folder("a", folder, trusted=True).created  # the operator's own flag


def test_folder_may_be_named_relative_to_a_root(registry: VerifyingRegistry, make_adapter: MakeAdapter) -> None:
    make_adapter("acme/one")
    assert registry.register_folder("a", "acme/one").created


def test_link_to_a_file_outside_does_not_lead_out(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    folder = make_adapter()
    shutil.move(folder / "adapter_config.json", tmp_path / "outside.json")
    (folder / "adapter_config.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(InvalidAdapterError, match="not a regular file in its folder"):
        registry.register_folder("a", folder)


def test_links_inside_the_root_are_followed_as_a_hub_cache_needs(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, config: AdapterConfig
) -> None:
    folder = make_adapter()
    shutil.move(folder / "adapter_model.safetensors", config.adapter_root[0] / "blob")
    (folder / "adapter_model.safetensors").symlink_to(config.adapter_root[0] / "blob")
    assert registry.register_folder("a", folder).created


def test_pipe_in_place_of_a_file_does_not_hang(registry: VerifyingRegistry, make_adapter: MakeAdapter) -> None:
    folder = make_adapter()
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(InvalidAdapterError, match="not a regular file"):
        registry.register_folder("a", folder)


def test_pickle_in_the_folder_is_refused_in_words(registry: VerifyingRegistry, make_adapter: MakeAdapter) -> None:
    folder = make_adapter()
    torch.save({}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidAdapterError, match="pickle"):
        registry.register_folder("a", folder)


def test_pickle_beside_safetensors_is_passed_over(registry: VerifyingRegistry, make_adapter: MakeAdapter) -> None:
    folder = make_adapter()
    torch.save({}, folder / "adapter_model.bin")
    assert registry.register_folder("a", folder).created


def test_file_exchanged_after_the_copy_cannot_slip_in(
    registry: VerifyingRegistry,
    make_adapter: MakeAdapter,
    store: DiskStore,
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lora_serve.model.lora import validation as module

    folder, evil = make_adapter("good"), make_adapter("evil", seed=9)
    check = module.check_values

    def exchange(*args: object, **kwargs: object) -> None:
        check(*args, **kwargs)  # type: ignore[arg-type]
        shutil.copy(evil / "adapter_model.safetensors", folder)

    monkeypatch.setattr(module, "check_values", exchange)
    ref = registry.register_folder("a", folder).ref
    assert fetch_adapter(store, spec, ref).digest == ref.digest


def test_foreign_id_is_refused_before_anything_is_read(registry: VerifyingRegistry, make_adapter: MakeAdapter) -> None:
    registry.register_folder("acme/a", make_adapter())
    with pytest.raises(ConflictError):
        registry.register_folder("acme/a", "/nowhere", tenant="globex")


def test_bytes_go_only_when_nothing_names_them(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, store: DiskStore, catalog: Catalog
) -> None:
    folder = make_adapter()
    digest = registry.register_folder("a", folder).ref.digest
    registry.register_folder("b", folder)
    assert registry.delete("a") == ()
    assert not registry.collect(digest)
    assert store.has(digest)
    assert registry.delete("b") == (digest,)
    assert held(catalog) == {digest}
    assert registry.collect(digest)
    assert not store.has(digest)
    assert held(catalog) == set()
    with pytest.raises(AdapterNotFoundError):
        registry.delete("b")


def test_deleted_and_registered_again_before_its_bytes_are_collected(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, store: DiskStore, catalog: Catalog
) -> None:
    folder = make_adapter()
    digest = registry.register_folder("a", folder).ref.digest
    registry.delete("a")
    registry.register_folder("a", folder)
    assert not registry.collect(digest)
    assert store.has(digest)
    assert held(catalog) == set()


def test_pinning_what_is_not_there(registry: VerifyingRegistry, catalog: Catalog, make_adapter: MakeAdapter) -> None:
    registry.register_folder("a", make_adapter())
    assert catalog.set_pinned("a", True).pinned
    with pytest.raises(AdapterNotFoundError):
        catalog.set_pinned("b", True)


def test_sweep_removes_leftovers_and_keeps_what_is_named(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, store: DiskStore, config: AdapterConfig, catalog: Catalog
) -> None:
    kept = registry.register_folder("a", make_adapter("a", seed=1)).ref.digest
    orphan = registry.register_folder("b", make_adapter("b", seed=2)).ref.digest
    registry.delete("b")
    (registry.new_folder() / "half").write_text("x")
    (config.store / "blobs" / "no digest").mkdir()
    registry.sweep()
    assert store.digests() == {kept}
    assert orphan not in store.digests()
    assert leftovers(config) == []
    assert set(os.listdir(config.store / "blobs")) == {kept.removeprefix("sha256:"), "no digest"}
    assert not (config.store / "unnamed").exists()
    assert held(catalog) == set()


def test_sweep_goes_on_beside_registrations_and_leaves_what_they_write(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, store: DiskStore, config: AdapterConfig, catalog: Catalog
) -> None:
    kept = registry.register_folder("a", make_adapter("a", seed=1)).ref.digest
    other = make_adapter("b", seed=2)
    stray = config.store / "blobs" / ("7" * 64)
    stray.mkdir()
    assert registry.sweep(seconds=0)  # the first piece: nothing of the blobs was looked at yet
    assert stray.exists()
    folder = registry.new_folder()  # of an upload that begins now
    leased = "sha256:" + "8" * 64
    (config.store / "blobs" / ("8" * 64)).mkdir()
    holder = catalog.leases.acquire(leased)
    while registry.sweep(seconds=0):
        registered = registry.register_folder("b", other)
    assert folder.exists()
    assert store.digests() == {kept, leased, registered.ref.digest}
    assert [digest for digest, _ in store.orphans.all()] == ["sha256:" + "7" * 64]
    assert not registry.sweep()
    assert catalog.leases.release(leased, holder)


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_sweep_sets_broken_blobs_aside_and_registering_again_heals(
    registry: VerifyingRegistry,
    make_adapter: MakeAdapter,
    store: DiskStore,
    config: AdapterConfig,
    spec: ModelSpec,
    damage: str,
) -> None:
    folder = make_adapter()
    ref = registry.register_folder("a", folder).ref
    weights = config.store / "blobs" / ref.digest.removeprefix("sha256:") / "adapter_model.safetensors"
    os.truncate(weights, 100) if damage == "truncate" else weights.unlink()
    registry.sweep()
    assert len(os.listdir(config.store / "quarantine")) == 1
    with pytest.raises(AdapterUnavailableError):
        fetch_adapter(store, spec, ref)
    assert not registry.register_folder("a", folder).created
    assert fetch_adapter(store, spec, ref).digest == ref.digest


def test_registering_again_heals_a_blob_with_one_wrong_bit(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, store: DiskStore, config: AdapterConfig, spec: ModelSpec
) -> None:
    folder = make_adapter()
    ref = registry.register_folder("a", folder).ref
    weights = config.store / "blobs" / ref.digest.removeprefix("sha256:") / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(AdapterUnavailableError, match="corrupt"):
        fetch_adapter(store, spec, ref)
    registry.register_folder("a", folder)
    assert fetch_adapter(store, spec, ref).digest == ref.digest


def test_store_that_cannot_be_written_is_not_the_callers_fault(
    registry: VerifyingRegistry, make_adapter: MakeAdapter, config: AdapterConfig, catalog: Catalog
) -> None:
    folder = make_adapter()
    shutil.rmtree(config.store / "tmp")
    (config.store / "tmp").write_text("in the way")
    with pytest.raises(AdapterUnavailableError) as caught:
        registry.register_folder("a", folder)
    assert str(config.store) not in str(caught.value)
    assert catalog.snapshot.page() == ()


def test_store_that_fails_half_way_leaves_no_version_behind(
    config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter
) -> None:
    class Failing(DiskStore):
        def put(self, digest: str, folder: Path) -> None:
            super().put(digest, folder)
            raise AdapterUnavailableError("the far store is away")

    with pytest.raises(AdapterUnavailableError, match="far store"):
        VerifyingRegistry(config, spec, catalog, Failing(config.store), FakeVerifier()).register_folder(
            "a", make_adapter()
        )
    assert catalog.snapshot.page() == ()
    assert store.digests() == frozenset()
    assert held(catalog) == set()


def test_every_hold_that_could_not_be_ended_is_ended_later(
    registry: VerifyingRegistry, catalog: Catalog, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "sha256:" + "7" * 64
    first, second = catalog.leases.acquire(digest), catalog.leases.acquire(digest)
    with monkeypatch.context() as patched:
        patched.setattr(catalog.leases, "release", _away)
        for holder in (first, second):
            with pytest.raises(AdapterUnavailableError):
                registry.collect(digest, holder)
    catalog.leases.drain(digest)
    registry.collect(digest)
    registry.retry_pending()
    assert not catalog.ledger.state.lease_on(digest).holders
    assert not registry.has_pending


def test_hold_whose_commit_was_made_and_not_heard_of_keeps_no_blob(
    registry: VerifyingRegistry,
    catalog: Catalog,
    store: DiskStore,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_adapter()
    with monkeypatch.context() as patched:
        lose_answers(catalog, patched)
        with pytest.raises(AdapterUnavailableError, match="lost"):
            registry.register_folder("a", folder)
    digest = registry.register_folder("a", folder).ref.digest
    registry.delete("a")
    registry.collect(digest)
    assert registry.has_pending
    registry.retry_pending()
    assert not registry.has_pending
    assert store.digests() == held(catalog) == set()


def _away(digest: str, holder: str) -> bool:
    raise AdapterUnavailableError("away")


def test_sweep_leaves_what_other_replicas_keep_in_the_far_store_but_not_our_own_strays(
    config: AdapterConfig,
    spec: ModelSpec,
    catalog: Catalog,
    store: DiskStore,
    make_adapter: MakeAdapter,
    tmp_path: Path,
) -> None:
    far = DiskStore(tmp_path / "far")
    theirs, ours = make_adapter("theirs", seed=1), make_adapter("ours", seed=2)
    far.put(adapter_digest(theirs), theirs)
    registry = VerifyingRegistry(config, spec, catalog, TieredStore(store, far), FakeVerifier())
    digest = registry.register_folder("a", ours).ref.digest
    registry.delete("a")  # and the server dies before it collects
    registry.sweep()
    assert far.digests() == {adapter_digest(theirs)}
    assert not store.has(digest)
