"""Weights rounded at load: as near as their format allows, and packed as compressed-tensors' own library packs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_serve.model.loading.packed_weight import packed, unpacked
from lora_serve.model.loading.rounding import KINDS, Rounding
from tests.model.loading.test_packed_checkpoints import RECORDED, RECORDED_NUMBERS

SIZE = (48, 256)


def weight(dtype: torch.dtype = torch.float32) -> Tensor:
    found = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    found[3] *= 40
    found[5] = 0
    found[7, ::64] *= 12
    return (found * 0.02).to(dtype)


def way(kind: str) -> Rounding:
    return Rounding(kind, 64 if kind == "int4" else None)


def numbers_of(kind: str, found: dict[str, Tensor]) -> Tensor:
    """float64: what the tensors stand for."""
    if kind == "fp8":
        codes = found["weight"].double()
    else:
        codes = unpacked(found["weight_packed"], 4 if kind == "int4" else 8).double()
    return codes * found["weight_scale"].double().repeat_interleave(SIZE[1] // found["weight_scale"].shape[1], 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_library(bits: int) -> None:
    numbers = (RECORDED_NUMBERS % (1 << bits) - (1 << (bits - 1))).to(torch.int8)
    found = packed(numbers, bits)
    assert " ".join(f"{word & 0xFFFFFFFF:08x}" for word in found.flatten().tolist()) == RECORDED[bits, 1]
    assert torch.equal(unpacked(found, bits)[:, : numbers.shape[1]], numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_forms_that_were_told_before(kind: str, dtype: torch.dtype) -> None:
    found, _, _ = way(kind).tensors(weight(dtype))
    assert {name: (one.dtype, [*one.shape]) for name, one in found.items()} == way(kind).forms(SIZE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_error_that_is_told_is_that_of_the_tensors(kind: str, dtype: torch.dtype) -> None:
    found, error, squares = way(kind).tensors(weight(dtype))
    wanted = weight(dtype).double()
    assert error == pytest.approx(float((numbers_of(kind, found) - wanted).square().sum()), rel=1e-4)
    assert squares == pytest.approx(float(wanted.square().sum()), rel=1e-4)
    assert not bool(numbers_of(kind, found)[5].any())


@pytest.mark.parametrize(("kind", "share"), [("int4", 0.9), ("int8", 1.001), ("fp8", 0.95)])
def test_chosen_scales_err_less_than_those_of_the_largest_number(kind: str, share: float) -> None:
    """Against rounding to nearest by the scale that compressed-tensors computes of the largest number."""
    groups = weight().double().view(SIZE[0], -1, 64 if kind == "int4" else SIZE[1])
    half = {"int4": 8, "int8": 128}.get(kind)
    scale = (groups.abs().amax(-1, keepdim=True) / (half - 0.5 if half else 448)).clamp_min(1e-30)
    codes = groups / scale
    plain = codes.round().clamp(-half, half - 1) if half else codes.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    found, _, _ = way(kind).tensors(weight())
    wanted = weight().double()
    errors = (((one.reshape(SIZE) - wanted).square().sum(1)) for one in (numbers_of(kind, found), plain * scale))
    mine, theirs = (float((error / wanted.square().sum(1).clamp_min(1e-30)).sum()) for error in errors)
    assert mine <= share * theirs


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_are_refused(kind: str) -> None:
    for value in (float("nan"), float("inf")):
        lying = weight()
        lying[-1, -1] = value
        with pytest.raises(ValueError, match="not all finite"):
            way(kind).tensors(lying)


def test_numbers_too_small_for_a_type_become_zeros() -> None:
    found, error, squares = Rounding("int8").tensors(torch.full((2, 32), 6e-8, dtype=torch.float16))
    assert bool((found["weight_scale"] == 1).all())
    assert error == squares


@pytest.mark.parametrize(("num_inputs", "size"), [(256, 128), (192, 64), (96, 32), (48, None)])
def test_groups_are_the_largest_that_divide_the_inputs(num_inputs: int, size: int | None) -> None:
    found = Rounding.of("int4", num_inputs)
    assert (found and found.group_size) == size
    assert Rounding.of("int8", num_inputs) == Rounding("int8")


def test_groups_that_were_asked_for_must_divide() -> None:
    assert Rounding.of("int4", 96, 32) == Rounding("int4", 32)
    with pytest.raises(ValueError, match="groups of 64 do not divide its 96 inputs"):
        Rounding.of("int4", 96, 64)
