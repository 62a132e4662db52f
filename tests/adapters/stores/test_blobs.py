"""What a loader reads is what it hashed: whatever becomes of the files meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME, adapter_digest, read_content
from lora_serve.adapters.checkpoint.weights import parse_checked
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.tiered import TieredStore, VerifiedBlob
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.model_spec import ModelSpec
from tests.loading import fetch_saved

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

DOWN0 = "model.layers.0.mlp.down_proj"
DOWN0_A = f"base_model.model.{DOWN0}.lora_A.weight"


class Swapped(StoredBlobs):
    """Another adapter's weights come right after the store has checked what was there."""

    def __init__(self, disk: DiskStore, blob: Path, other: Path) -> None:
        super().__init__(disk, disk)
        self._blob = blob
        self._other = other

    @contextmanager
    def verified(self, digest: str) -> Iterator[VerifiedBlob]:
        with super().verified(digest) as found:
            self._swap()
            yield found

    @contextmanager
    def near(self, digest: str) -> Iterator[Path]:
        raise AdapterUnavailableError("not here")
        yield

    def _swap(self) -> None:
        (self._blob / WEIGHTS_NAME).unlink()
        shutil.copy(self._other / WEIGHTS_NAME, self._blob / WEIGHTS_NAME)


def ref_of(folder: Path) -> AdapterRef:
    return AdapterRef("acme", "acme/a", 1, adapter_digest(folder), 4, 0)


def stored(root: Path, folder: Path) -> tuple[DiskStore, Path]:
    disk, digest = DiskStore(root), adapter_digest(folder)
    disk.put(digest, folder)
    return disk, root / "blobs" / digest.removeprefix("sha256:")


def test_weights_swapped_after_the_stores_look_are_refused(
    make_adapter: MakeAdapter, spec: ModelSpec, tmp_path: Path
) -> None:
    folder, other = make_adapter(), make_adapter("other", seed=9)
    ref = ref_of(folder)
    disk, blob = stored(tmp_path / "store", folder)
    with pytest.raises(AdapterUnavailableError, match="corrupt"):
        fetch_saved(Swapped(disk, blob, other), spec, ref)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_files_written_over_after_they_were_read_change_nothing(
    make_adapter: MakeAdapter, spec: ModelSpec, name: str
) -> None:
    folder = make_adapter()
    ref, expected = ref_of(folder), load_file(folder / WEIGHTS_NAME)[DOWN0_A].clone()
    content = read_content(folder, ref.digest)
    (folder / name).write_bytes(bytes((folder / name).stat().st_size))
    assert torch.equal(parse_checked(content, ref, spec).linears[DOWN0].a, expected)


def test_wrong_copy_on_this_machine_is_mended_from_the_far_store(
    make_adapter: MakeAdapter, spec: ModelSpec, tmp_path: Path
) -> None:
    folder, other = make_adapter(), make_adapter("other", seed=9)
    ref = ref_of(folder)
    near, blob = stored(tmp_path / "near", folder)
    far, _ = stored(tmp_path / "far", folder)
    (blob / WEIGHTS_NAME).unlink()
    shutil.copy(other / WEIGHTS_NAME, blob / WEIGHTS_NAME)
    _, times = fetch_saved(StoredBlobs(TieredStore(near, far, "redis"), near), spec, ref)
    assert times.tier == "redis"
    assert adapter_digest(blob) == ref.digest
    assert fetch_saved(StoredBlobs(TieredStore(near, far, "redis"), near), spec, ref)[1].tier == "disk"


@pytest.mark.parametrize("padding", range(4))
def test_tensors_that_lie_on_odd_bytes_are_read(make_adapter: MakeAdapter, spec: ModelSpec, padding: int) -> None:
    folder = make_adapter()
    path = folder / WEIGHTS_NAME
    expected = load_file(path)[DOWN0_A].clone()
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end])).encode() + b" " * padding
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    ref = ref_of(folder)
    assert torch.equal(parse_checked(read_content(folder, ref.digest), ref, spec).linears[DOWN0].a, expected)
