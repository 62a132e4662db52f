"""Products of weights in FP8: their function in float64, each token by itself, and what GPUs ask of a call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, _meta_registrations, nn

from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.loading.float8 import (
    Float8Linear,
    Float8Weight,
    can_multiply,
    quantized,
    reference_product,
    scaled_product,
)
from tests.float8_packer import RECORDED, RECORDED_WEIGHT, packed

IN, OUT = 96, 48
LARGEST_ERROR = 2**-4  # of a number that is rounded to 3 bits behind its first


def weight(num_outputs: int = OUT, dtype: torch.dtype = torch.float32, seed: int = 1) -> Float8Weight:
    scale = 0.5 + torch.rand(num_outputs, 1, generator=torch.Generator().manual_seed(seed))
    numbers = torch.randn(num_outputs, IN, generator=torch.Generator().manual_seed(seed)) * 100
    return Float8Weight(numbers.to(torch.float8_e4m3fn), scale / 100, dtype)


def tokens(count: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, IN, generator=generator) * torch.logspace(-6, 6, count)[:, None]


def rounded(x: Tensor) -> Tensor:
    """float64: the nearest number of e4m3's own grid, found by looking at all of them."""
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()].unique()
    scale = (x.abs().amax(-1, keepdim=True).float() / 448).double()
    return grid[(x.double()[..., None] / scale[..., None] - grid).abs().argmin(-1)] * scale


@pytest.mark.parametrize(("strategy", "dtype"), RECORDED)
def test_packer_of_these_tests_writes_what_compressed_tensors_writes(strategy: str, dtype: torch.dtype) -> None:
    numbers, scale = packed(torch.tensor(RECORDED_WEIGHT).to(dtype), strategy)
    bytes_of_numbers, scales = RECORDED[strategy, dtype]
    assert bytes(numbers.view(torch.uint8).flatten().tolist()).hex() == bytes_of_numbers
    assert scale.dtype == dtype
    assert scale.flatten().tolist() == [float.fromhex(one) for one in scales]


def test_quantised_at_load_is_what_compressed_tensors_writes() -> None:
    numbers, found = quantized(torch.tensor(RECORDED_WEIGHT))
    bytes_of_numbers, scales = RECORDED["channel", torch.float32]
    assert bytes(numbers.view(torch.uint8).flatten().tolist()).hex() == bytes_of_numbers
    assert found.flatten().tolist() == [float.fromhex(one) for one in scales]


def test_product_is_that_of_tokens_rounded_by_their_own_scale() -> None:
    x, w = tokens(), weight()
    expected = rounded(x) @ (w.stored.double() * w.scale.double()).t()
    found = w.multiply(x, None)
    assert found.dtype == torch.float32
    assert ((found - expected).abs().amax(-1) <= 1e-6 * expected.abs().amax(-1)).all()


def test_rounding_of_inputs_is_all_that_is_lost() -> None:
    x, w = tokens(), weight()
    dense = w.stored.double() * w.scale.double()
    assert torch.allclose(w.multiply_exactly(x).double(), x.double() @ dense.t(), rtol=1e-4, atol=1e-9)
    most = LARGEST_ERROR * (x.abs().double() @ dense.abs().t())
    assert ((w.multiply(x, None) - x.double() @ dense.t()).abs() <= most).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    x, w = tokens(40).to(dtype), weight(dtype=dtype)
    together = w.multiply(x, None)
    assert together.dtype == dtype
    for i in range(len(x)):
        assert torch.equal(w.multiply(x[i : i + 1], None)[0], together[i])


def test_token_of_zeros_is_zero_and_one_that_is_no_number_is_so_alone() -> None:
    x, w = tokens(), weight()
    clean = w.multiply(x, None)
    x[2], x[5, 7], x[6, 1] = 0.0, float("nan"), float("inf")
    found = w.multiply(x, None)
    assert (found[2] == 0).all()
    assert found[5].isnan().all()
    assert not found[6].isfinite().any()
    others = [0, 1, 3, 4, 7, 8]
    assert torch.equal(found[others], clean[others])


def test_weights_of_one_input_are_joined_with_their_scales() -> None:
    layers = [FrozenLinear(layer_of(weight(size, seed=size), bias=size == 16)) for size in (32, 16, 48)]
    x = tokens(5)
    expected = torch.cat([layer.sums(x) for layer in layers], dim=-1)
    whole = FrozenLinear.joined(layers)
    assert whole is not None
    assert torch.equal(whole.sums(x), expected)
    assert torch.equal(torch.cat([layer.sums(x) for layer in layers], dim=-1), expected)
    storage = whole.weight.stored.untyped_storage()
    assert all(layer.weight.stored.untyped_storage().data_ptr() == storage.data_ptr() for layer in layers)
    assert storage.nbytes() == (32 + 16 + 48) * IN


def test_layers_of_different_kinds_are_not_joined() -> None:
    plain = FrozenLinear(nn.Linear(IN, OUT, bias=False).requires_grad_(False))
    assert FrozenLinear.joined([FrozenLinear(layer_of(weight())), plain]) is None
    assert FrozenLinear.joined([plain, FrozenLinear(layer_of(weight()))]) is None


def layer_of(found: Float8Weight, *, bias: bool = False) -> Float8Linear:
    like = nn.Linear(IN, found.out_features, bias=bias, dtype=found.dtype).requires_grad_(False)
    return Float8Linear(like, found.stored, found.scale)


def test_layer_is_of_the_models_type_and_tells_no_plain_weight() -> None:
    frozen = FrozenLinear(layer_of(weight(dtype=torch.bfloat16)))
    assert frozen.dtype == torch.bfloat16
    assert frozen.dense() is None
    assert frozen.packed is None


@pytest.mark.parametrize("size", [32, 40])
def test_call_has_the_form_that_torch_asks_of_one_on_a_gpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks types, shapes and layouts of tensors without numbers by the same rules."""
    monkeypatch.setattr(_meta_registrations, "device_hint", lambda tensor: "cuda")
    numbers = torch.empty(64, size, dtype=torch.float8_e4m3fn, device="meta")[16:]  # as one of joined layers
    for count in (1, 7):
        x = torch.empty(count, size, dtype=torch.bfloat16, device="meta")
        if size % 16:
            with pytest.raises(RuntimeError, match="divisible by 16"):
                scaled_product(x, numbers, torch.empty(64, 1, device="meta")[16:])
        else:
            found = scaled_product(x, numbers, torch.empty(64, 1, device="meta")[16:])
            assert (found.shape, found.dtype) == ((count, 48), torch.bfloat16)


def test_gpus_since_ada_multiply_layers_of_whole_sixteens(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capability = torch.device("cuda"), [(8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert can_multiply(nn.Linear(32, 48, device="meta"), cuda)
    assert not can_multiply(nn.Linear(40, 48, device="meta"), cuda)
    assert not can_multiply(nn.Linear(32, 40, device="meta"), cuda)
    assert not can_multiply(nn.Linear(32, 48, device="meta"), torch.device("cpu"))
    capability[0] = (8, 0)
    assert not can_multiply(nn.Linear(32, 48, device="meta"), cuda)


def test_reference_is_the_function_of_the_gpus_call() -> None:
    """What torch documents of `_scaled_mm`: (a * scale_a) @ (b * scale_b), on numbers as they are given."""
    x, w = tokens(4), weight()
    calls = {}

    def scaled_mm(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: bool
    ) -> Tensor:
        calls["scales"] = scale_a.shape, scale_b.shape
        return ((a.double() * scale_a) @ (b.double() * scale_b)).to(out_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", scaled_mm)
        found = scaled_product(x, w.stored, w.scale)
    assert calls["scales"] == ((4, 1), (1, OUT))
    expected = reference_product(x, w.stored, w.scale)
    assert torch.allclose(found.float(), expected, rtol=2**-7)
