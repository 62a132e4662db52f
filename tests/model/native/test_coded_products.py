"""Products by weights of small integers and FP8 numbers: those of the dequantised weight in float64, a row's bits are
its own, and the same at every level of one order.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_serve.model.native import compiler, library
from lora_serve.model.native.coded_linear import CodedLinear, Form, code
from lora_serve.model.native.operators import join
from tests.model.native.test_bfloat16_products import BUILDS, BY_DAY, HERE, assert_same_bits
from tests.tiers import by_tier

FLOAT8 = torch.float8_e4m3fn
FORMS = {"int4": Form.NIBBLES, "int8": Form.BYTES, "fp8": Form.FLOAT8S}
GROUPS = (8, 32, 64, 128, 7, 20, None)  # None: one
SHAPES = ((40, 64), (161, 70), (7, 3), (33, 1290))  # out, in
ROWS = (1, 2, 3, 4, 5, 7, 12, 13, 16, 33, 40)
SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Weight:
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor

    def coded(self, dtype: torch.dtype) -> CodedLinear:
        found = code(self.codes, self.scales, self.zeros, self.groups, dtype)
        assert found is not None
        return found

    def exact(self) -> Tensor:
        """W in float64."""
        numbers = self.codes.double()
        if self.zeros is not None:
            numbers -= self.zeros.double()[:, self.groups]
        return numbers * self.scales.double()[:, self.groups]

    def bound(self, x: Tensor) -> Tensor:
        """What the terms of the sums come to at most, however large the zeros make them."""
        size = self.codes.double().abs()
        if self.zeros is not None:
            size += self.zeros.double().abs()[:, self.groups]
        return x.double().abs() @ (size * self.scales.double()[:, self.groups]).t()


def weight_of(
    form: str,
    shape: tuple[int, int],
    group: int | None,
    *,
    has_zeros: bool = False,
    ordered: bool = False,
    seed: int = 0,
) -> Weight:
    torch.manual_seed(seed)
    out, width = shape
    groups = torch.arange(width) // (group or width)
    half = {"int4": 8, "int8": 128, "fp8": 0}[form]
    codes = torch.randint(-half, half, shape, dtype=torch.int8) if half else (torch.randn(shape) * 9.0).to(FLOAT8)
    count = int(groups[-1]) + 1
    scales = torch.rand(out, count) * 2.0 ** torch.randint(-20, 3, (out, count)).float()  # many are denormal halves
    zeros = torch.randint(-half, half, (out, count), dtype=torch.int8) if has_zeros and half else None
    scales = scales.to(SCALES[seed % 3])
    return Weight(codes, scales, zeros, groups[torch.randperm(width)] if ordered else groups)


def each_weight() -> list[Weight]:
    cases = [
        (form, group, has_zeros, ordered)
        for form in FORMS
        for group in GROUPS
        for has_zeros, ordered in ((False, False), (True, False), (True, True))
        if form != "fp8" or not has_zeros
    ]
    return [
        weight_of(form, SHAPES[i % len(SHAPES)], group, has_zeros=has_zeros, ordered=ordered, seed=i)
        for i, (form, group, has_zeros, ordered) in enumerate(cases)
    ]


def check(x: Tensor, weight: Weight, bias: Tensor, y: Tensor) -> None:
    wanted, size = x.double() @ weight.exact().t() + bias.double(), weight.bound(x) + bias.double().abs()
    assert y.dtype == torch.float32
    assert bool(((y.double() - wanted).abs() <= (2 * x.shape[1] + 8) * 2.0**-24 * size).all())


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_that_of_the_dequantised_weight_and_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    for weight in each_weight():
        packed, (out, width) = weight.coded(dtype), weight.codes.shape
        x, bias = torch.randn(40, width + 3).to(dtype)[:, :width], torch.randn(out)
        alone = torch.cat([packed(x[row : row + 1], bias) for row in range(40)])
        for rows in ROWS:
            found = packed(x[40 - rows :], bias)
            check(x[40 - rows :], weight, bias, found)
            assert_same_bits(found, alone[40 - rows :])


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    for weight in each_weight():
        packed, exact = weight.coded(dtype), weight.exact()
        assert packed.kind & 15 == (Form.FLOAT8S if weight.codes.dtype == FLOAT8 else FORMS[_form(weight)])
        assert torch.equal(torch.cat(list(packed.dequantized())), exact.float())
        assert torch.equal(packed.dense(), exact.float().to(dtype))


def _form(weight: Weight) -> str:
    return "int4" if int(weight.codes.max()) < 8 and int(weight.codes.min()) >= -8 else "int8"


def built(place: Path, level: str, dtype: str, defined: tuple[str, ...]) -> ctypes.CDLL:
    source, flags = compiler.SOURCE.with_name("packed_linear.c"), compiler.flags(compiler.LEVELS[level], dtype)
    flags = tuple("-O1" if flag == "-O3" else flag for flag in flags)
    subprocess.run(["cc", *flags, *defined, "-Wno-psabi", "-shared", source, "-o", place], check=True)
    return ctypes.CDLL(str(place))


FLOAT_BUILDS = {f"float, {name}": (name, ()) for name in ("avx2", "avx512") if name in HERE}
EVERY: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "float32": FLOAT_BUILDS,
    "bfloat16": {name: BUILDS[name] for name in by_tier(BY_DAY, tuple(BUILDS))},
}


@pytest.mark.parametrize(("dtype", "order"), [("float32", "float"), ("bfloat16", "dot"), ("bfloat16", "blocks")])
def test_bits_are_the_same_by_every_build(
    dtype: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number, (name, (level, defined)) in enumerate(EVERY[dtype].items()):
        if name.startswith(order):
            kernels = built(tmp_path / f"{number}.so", level, dtype, defined)
            monkeypatch.setattr(library, "load", lambda _, kernels=kernels: kernels)
            found.append(products(getattr(torch, dtype)))
    assert found
    for one in found[1:]:
        for mine, wanted in zip(one, found[0], strict=True):
            assert_same_bits(mine, wanted)


def products(dtype: torch.dtype) -> list[Tensor]:
    """Of every weight by one row and by many, numbers of all sizes; each is right."""
    found = []
    for weight in each_weight():
        out, width = weight.codes.shape
        x = (torch.randn(33, width) * 2.0 ** torch.randint(-40, 20, (33, 1)).float()).to(dtype)
        x[5] = torch.randn(width).to(dtype) * 2.0**-90
        bias = torch.zeros(out)
        y = weight.coded(dtype)(x, bias)
        check(x[:5], weight, bias, y[:5])
        found += [y, weight.coded(dtype)(x[:1], None)]
        assert_same_bits(found[-1], y[:1])
    return found


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_row_that_is_not_finite_reaches_no_other(bad: float) -> None:
    packed = weight_of("int4", (40, 64), 32, has_zeros=True).coded(torch.float32)
    x = torch.randn(9, 64)
    clean = packed(x, None)
    x[4, 7] = bad
    found = packed(x, None)
    assert not found[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("ordered", [False, True])
def test_joined_weights_are_each_and_all(ordered: bool) -> None:
    weights = [
        weight_of("int4", (out, 64), 16, has_zeros=True, ordered=ordered, seed=3 * i)
        for i, out in enumerate((64, 32, 40))
    ]
    weights = [Weight(one.codes, one.scales, one.zeros, weights[0].groups) for one in weights]
    packed = [one.coded(torch.float32) for one in weights]
    found = join(packed)
    assert found is not None
    together, parts = found
    x = torch.randn(5, 64)
    y = together(x, None)
    for one, (columns, part) in zip(packed, parts, strict=True):
        assert torch.equal(part(x, None), y[:, columns])
        assert torch.equal(one(x, None), y[:, columns])
        assert part.panels.untyped_storage().data_ptr() == together.panels.untyped_storage().data_ptr()


def test_weights_of_other_groups_orders_or_codes_are_not_joined() -> None:
    plain = weight_of("int4", (32, 64), 16)
    others = [
        weight_of("int4", (32, 64), 32),
        weight_of("int4", (32, 64), 16, ordered=True),
        weight_of("int4", (32, 64), 16, has_zeros=True),
        weight_of("int8", (32, 64), 16),
    ]
    assert all(join([plain.coded(torch.float32), other.coded(torch.float32)]) is None for other in others)


NO_ROOM: Mapping[str, Callable[[], Weight]] = {
    "a zero of 128": lambda: _with(zeros=torch.full((32, 4), 128, dtype=torch.int16)),
    "every input in one group of many": lambda: _with(groups=torch.zeros(64, dtype=torch.int64)),
}


def _with(**changes: Tensor) -> Weight:
    plain = weight_of("int4", (32, 64), 16)
    return Weight(**{name: getattr(plain, name) for name in ("codes", "scales", "zeros", "groups")} | changes)


@pytest.mark.parametrize("name", NO_ROOM)
def test_what_panels_have_no_room_for_is_told(name: str) -> None:
    weight = NO_ROOM[name]()
    assert code(weight.codes, weight.scales, weight.zeros, weight.groups, torch.float32) is None


@pytest.mark.parametrize(
    ("bits", "group", "has_zeros"), [(4, 32, True), (4, 128, True), (4, 128, False), (8, None, False)]
)
def test_panels_take_hardly_more_bytes_than_the_file(bits: int, group: int | None, has_zeros: bool) -> None:
    weight = weight_of(f"int{bits}", (576, 1536), group, has_zeros=has_zeros)
    count = weight.scales.numel()
    stored = weight.codes.numel() * bits // 8 + count * 2 + (count * bits // 8 if has_zeros else 0)
    assert weight.coded(torch.bfloat16).panels.nbytes <= 1.05 * stored
