from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.model.lora.validation import _is_finite, is_zero
from tests.loading import fetch_adapter, load_adapter

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

DOWN0 = "model.layers.0.mlp.down_proj"


def ref_of(folder: Path, spec: ModelSpec) -> AdapterRef:
    artifact = read_artifact(folder, spec)
    return AdapterRef("acme", "acme/a", 1, artifact.digest, 4, 0)


def load(folder: Path, spec: ModelSpec) -> SavedAdapter:
    return load_adapter(folder, ref_of(folder, spec), spec)


def test_weights_are_the_files_own_with_b_transposed(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter(rank=3)
    saved = load_file(folder / "adapter_model.safetensors")
    module = load(folder, spec).linears[DOWN0]
    assert torch.equal(module.a, saved[f"base_model.model.{DOWN0}.lora_A.weight"])
    assert torch.equal(module.b, saved[f"base_model.model.{DOWN0}.lora_B.weight"].T)
    assert (module.a.shape, module.b.shape) == ((3, 24), (3, 16))
    assert module.a.is_contiguous()
    assert module.b.is_contiguous()
    assert module.scale == 8 / 3


@pytest.mark.parametrize(
    ("stored", "on_host"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_float16_is_widened_on_the_host_and_bfloat16_kept(
    make_adapter: MakeAdapter, spec: ModelSpec, stored: torch.dtype, on_host: torch.dtype
) -> None:
    folder = make_adapter(dtype=stored)
    adapter = load(folder, spec)
    assert {tensor.dtype for module in adapter.linears.values() for tensor in (module.a, module.b)} == {on_host}


def test_a_pair_of_two_dtypes_takes_the_wider(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        name = f"base_model.model.{DOWN0}.lora_A.weight"
        tensors[name] = tensors[name].bfloat16()

    folder = make_adapter(change=narrow)
    adapter = load(folder, spec)
    assert adapter.linears[DOWN0].a.dtype == torch.float32


def test_rank_one_weights_own_their_memory(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter(rank=1)
    adapter = load(folder, spec)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    before = adapter.linears[DOWN0].b.clone()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert torch.equal(adapter.linears[DOWN0].b, before)


def test_corrupt_files_are_never_served(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter()
    ref = ref_of(folder, spec)
    weights = folder / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # one bit of one weight: the file is still well formed
    weights.write_bytes(content)
    with pytest.raises(AdapterUnavailableError, match="corrupt"):
        load_adapter(folder, ref, spec)


def test_fetching_from_a_store_that_lost_it_says_so(make_adapter: MakeAdapter, spec: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter()
    ref = ref_of(folder, spec)
    store = DiskStore(tmp_path / "store")
    store.put(ref.digest, folder)
    assert fetch_adapter(store, spec, ref).digest == ref.digest
    store.delete(ref.digest)
    with pytest.raises(AdapterUnavailableError):
        fetch_adapter(store, spec, ref)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_sixteen_bits_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert _is_finite(OneTensor(every[every.isfinite()]), "any")
    assert not any(_is_finite(OneTensor(value[None]), "any") for value in every[~every.isfinite()])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38, -1e-45, 0.0])
def test_values_of_thirty_two_bits_are_judged_as_torch_does(value: float) -> None:
    tensor = torch.tensor([[1.0, value]])
    assert _is_finite(OneTensor(tensor), "any") == bool(tensor.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_minus_zero_is_zero_and_the_smallest_value_is_not(dtype: torch.dtype) -> None:
    assert is_zero(torch.full((2, 2), -0.0, dtype=dtype))
    assert not is_zero(torch.tensor([[0.0, torch.finfo(dtype).smallest_normal]], dtype=dtype))


class OneTensor:
    """An opened safetensors file that holds one tensor under every name."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_widening_and_copying_keep_every_value(make_adapter: MakeAdapter, spec: ModelSpec, dtype: torch.dtype) -> None:
    folder = make_adapter(dtype=dtype, rank=5)
    saved = load_file(folder / "adapter_model.safetensors")
    for path, module in load(folder, spec).linears.items():
        assert torch.equal(module.a.float(), saved[f"base_model.model.{path}.lora_A.weight"].float())
        assert torch.equal(module.b.float(), saved[f"base_model.model.{path}.lora_B.weight"].T.float())
        assert module.b.is_contiguous()
