"""A second load comes from the prepared file and is the same; a file that is not sound is not used."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.content import dummy_adapter_ref
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError
from lora_serve.model.adapter_reader import AdapterReader
from lora_serve.model.lora.host_adapter import HostAdapter, pinned_bytes
from tests.local_engine import LocalEngine
from tests.oracle import save_adapter, save_tiny_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclasses.dataclass
class House:
    """A store with one adapter, and what loads from it."""

    source: AdapterReader
    disk: DiskStore
    ref: AdapterRef
    blob: Path

    def prepared(self) -> list[Path]:
        return list(self.blob.glob("prepared-*"))

    def load_and_keep(self) -> HostAdapter:
        value = self.source.load(self.ref).value
        self.source.keep(self.ref, value)
        return value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> LocalEngine:
    return LocalEngine(model, block_size=4, kv_cache_memory="100KiB")


def house_of(engine: LocalEngine, model: Path, root: Path, **config: Any) -> House:
    folder = save_adapter(model, root / "adapter", **{"r": 4, "lora_alpha": 8, "target_modules": ALL, **config})
    digest = read_artifact(folder, engine.parts.spec).digest
    disk = DiskStore(root / "store")
    disk.put(digest, folder)
    ref = AdapterRef("default", "acme/a", 1, digest, 4, 1000)
    blob = root / "store" / "blobs" / digest.removeprefix("sha256:")
    return House(AdapterReader(StoredBlobs(disk, disk), engine.parts), disk, ref, blob)


@pytest.fixture
def house(engine: LocalEngine, model: Path, tmp_path: Path) -> House:
    return house_of(engine, model, tmp_path)


def same(one: HostAdapter, other: HostAdapter) -> bool:
    facts = [(a.digest, a.rank, a.num_bytes, list(a.deltas)) for a in (one, other)]
    pairs = [(one.deltas[path], other.deltas[path]) for path in one.deltas]
    return facts[0] == facts[1] and all(
        torch.equal(a.a, b.a) and torch.equal(a.b, b.b) and (a.a.dtype, a.scale) == (b.a.dtype, b.scale)  # type: ignore
        for a, b in pairs
    )


@pytest.mark.parametrize(
    "config", [{}, {"use_rslora": True}, {"target_modules": ["q_proj"]}, {"rank_pattern": {"q": 2}}]
)
def test_second_load_is_the_first_from_one_flat_file(
    engine: LocalEngine, model: Path, tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = house_of(engine, model, tmp_path, **config)
    first = house.load_and_keep()
    monkeypatch.setattr(AdapterReader, "_ordinary", lambda *_: pytest.fail("the adapter's own files were read"))
    second = house.source.load(house.ref)
    assert same(first, second.value)
    assert second.value.arena is not None
    assert second.times.tier == "disk"
    assert min(second.times.fetch, second.times.verify, second.times.parse) > 0


def test_prepared_columns_are_those_of_its_tensors(house: House, engine: LocalEngine) -> None:
    house.load_and_keep()
    value = house.source.load(house.ref).value
    assert value.columns is not None
    for index, path in enumerate(engine.parts.spec.linears):
        delta = value.deltas.get(path)
        assert value.columns.deltas[index] is delta
        assert value.columns.tables.a[index] == (0 if delta is None else delta.a.data_ptr())  # type: ignore[union-attr]
        assert value.columns.tables.rank[index] == (0 if delta is None else 4)


@pytest.mark.parametrize("damage", ["bit", "half", "empty", "magic", "other", "header"])
def test_file_that_is_not_what_was_written_is_removed_and_the_adapters_own_files_serve(
    house: House, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = house.load_and_keep()
    (path,) = house.prepared()
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-70] ^= 1
    elif damage in ("half", "empty"):
        del content[len(content) // 2 // 64 * 64 if damage == "half" else 0 :]
    elif damage == "magic":
        content[0] ^= 1
    elif damage == "header":
        content[60] ^= 1
    else:
        content = bytearray(b"x" * len(content))
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again = house.source.load(house.ref)
    assert same(first, again.value)
    assert house.prepared() == []
    assert "acme/a@1" in caplog.text
    house.source.keep(house.ref, again.value)
    assert len(house.prepared()) == 1


def test_file_of_another_adapter_is_not_taken_though_it_is_whole(house: House) -> None:
    value = house.load_and_keep()
    (path,) = house.prepared()
    other = dataclasses.replace(value, digest="sha256:" + "0" * 64)
    from lora_serve.model.lora import host_adapter as prepared

    path.write_bytes(prepared.pack(other, house.source._base))
    assert same(house.source.load(house.ref).value, value)
    assert house.prepared() == []


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}]
)  # the last equals the base's own
def test_what_depends_on_the_base_is_not_prepared(
    engine: LocalEngine, model: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    house = house_of(engine, model, tmp_path, **config)
    if config == {"bias": "all"}:  # this base has no biases: then it is plain LoRA
        assert house.load_and_keep().deltas
        return
    house.load_and_keep()
    assert house.prepared() == []


def test_prepared_file_is_private_goes_with_its_blob_and_leaves_nothing(house: House, tmp_path: Path) -> None:
    house.load_and_keep()
    (path,) = house.prepared()
    assert path.stat().st_mode & 0o077 == 0
    house.disk.delete(house.ref.digest)
    assert not list((tmp_path / "store").rglob("prepared-*"))
    with pytest.raises(AdapterUnavailableError):
        house.source.load(house.ref)


def test_sweep_at_the_start_takes_the_prepared_files_of_unnamed_adapters(house: House, tmp_path: Path) -> None:
    house.load_and_keep()
    house.disk.sweep(frozenset({house.ref.digest}), lambda *_: False)
    assert len(house.prepared()) == 1
    house.disk.sweep(frozenset(), lambda *_: True)
    assert not list((tmp_path / "store").rglob("prepared-*"))


def test_adapter_that_was_deleted_meanwhile_is_not_prepared(house: House) -> None:
    value = house.source.load(house.ref).value
    house.disk.delete(house.ref.digest)
    house.source.keep(house.ref, value)
    assert not house.blob.exists()


def test_full_disk_leaves_the_next_load_to_the_first_way(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskStore, "keep_beside", refuse)
    value = house.load_and_keep()
    assert same(house.source.load(house.ref).value, value)


def test_adapter_of_another_base_is_refused_with_a_prepared_file_too(house: House) -> None:
    house.load_and_keep()
    traits = dataclasses.replace(house.ref.traits, base="sha256:" + "1" * 64)
    with pytest.raises(InvalidAdapterError, match="another base"):
        house.source.load(dataclasses.replace(house.ref, traits=traits))


def test_tier_is_where_the_bytes_came_from(engine: LocalEngine, model: Path, tmp_path: Path, house: House) -> None:
    near = DiskStore(tmp_path / "near")
    far: AdapterStore = house.disk
    source = AdapterReader(StoredBlobs(TieredStore(near, far, "redis"), near), engine.parts)
    loaded = source.load(house.ref)
    assert loaded.times.tier == "redis"
    assert loaded.times.verify > 0
    assert source.load(house.ref).times.tier == "disk"
    source.keep(house.ref, loaded.value)
    shutil.rmtree(house.blob)
    assert same(source.load(house.ref).value, loaded.value)  # the far store is not asked for what is prepared here


def test_warm_up_adapter_needs_no_store(house: House, engine: LocalEngine, tmp_path: Path) -> None:
    ref = dummy_adapter_ref(engine.parts.spec)
    loaded = house.source.load(ref)
    house.source.keep(ref, loaded.value)
    assert loaded.times.tier == "none"
    assert loaded.value.digest == ref.digest


@pytest.mark.parametrize(
    ("num_bytes", "taken"), [(0, 0), (1, 1), (64, 64), (65, 128), (2**26, 2**26), (84_000_000, 2**27)]
)
def test_pinned_memory_is_the_next_power_of_two(num_bytes: int, taken: int) -> None:
    assert pinned_bytes(num_bytes) == taken


def test_a_load_says_what_its_pinned_memory_takes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    value = house.load_and_keep()
    assert house.source.load(house.ref).extra_bytes == 0
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    loaded = house.source.load(house.ref)
    assert loaded.times.tier == "disk"
    assert loaded.value.arena is not None
    assert loaded.extra_bytes + value.num_bytes == pinned_bytes(loaded.value.arena.nbytes) > value.num_bytes
