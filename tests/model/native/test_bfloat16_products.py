"""Products of bfloat16: the order of their sums is the one that is written down, with the instructions and without."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_serve.model.native import compiler
from lora_serve.model.native.operators import PackedLinear, PanelKind
from tests.tiers import by_tier, mostly_nightly

HERE = {level.name for level in compiler.available()}
PORTABLE = {  # build -> level whose vectors it uses, what it defines
    "dot, 8 lanes": ("avx2", ()),
    "dot, 16 lanes": ("avx512", ()),
    "blocks, 8 lanes": ("avx2", ("-DBFLOAT16_ORDER_BLOCKS",)),
    "blocks, 16 lanes": ("avx512", ("-DBFLOAT16_ORDER_BLOCKS",)),
}
INSTRUCTIONS = {"dot, instructions": ("avx512_bf16", ()), "blocks, instructions": ("amx", ())}
BUILDS = {name: build for name, build in {**PORTABLE, **INSTRUCTIONS}.items() if build[0] in HERE} or {
    "dot, plain": ("generic", ()),
    "blocks, plain": ("generic", ("-DBFLOAT16_ORDER_BLOCKS",)),
}
# By day each order in the shortest vectors, and by the processor's own instructions.
BY_DAY = tuple(name for name in BUILDS if name.endswith((" 8 lanes", "instructions", "plain")))
SHAPES = [(1, 1), (7, 3), (16, 16), (31, 33), (32, 64), (40, 513), (161, 70), (130, 1030)]  # out, in
ROWS = (1, 2, 3, 4, 5, 7, 12, 13, 16, 17, 31, 32, 33, 40)
NUMBERS = ("ordinary", "huge", "tiny", "wild")
SMALLEST = Fraction(1, 2**126)  # that is not denormal


@dataclass(frozen=True, slots=True)
class Build:
    """`packed_linear.c` by itself, compiled for one level."""

    library: Any

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, and nothing written beyond it."""
        out, width = weight.shape
        y = torch.full((x.shape[0] * out + 64,), 7.0)
        panels = self.pack(weight)
        self.library.packed_linear(
            ctypes.c_void_p(x.data_ptr()), *map(ctypes.c_int64, (x.stride(0), x.shape[0], width)),
            ctypes.c_void_p(panels.data_ptr()), ctypes.c_int64(PanelKind.DEPTH_PAIRS),
            ctypes.c_void_p(None if bias is None else bias.data_ptr()), ctypes.c_void_p(y.data_ptr()),
            ctypes.c_int64(out),
        )  # fmt: skip
        assert bool((y[x.shape[0] * out :] == 7.0).all())
        return y[: x.shape[0] * out].view(x.shape[0], out)

    def pack(self, weight: Tensor) -> Tensor:
        kind, (out, width) = ctypes.c_int64(PanelKind.DEPTH_PAIRS), weight.shape
        words = self.library.words_of_panel(kind, ctypes.c_int64(width))
        panels = torch.empty(-(-out // self.library.panel_outputs()), words, dtype=torch.int32)
        self.library.pack(
            ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(out), ctypes.c_int64(width),
            ctypes.c_void_p(panels.data_ptr()), kind,
        )  # fmt: skip
        return panels


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Build]:
    folder = tmp_path_factory.mktemp("build")
    return {
        name: built(folder / f"{number}.so", *BUILDS[name])
        for number, name in enumerate(by_tier(BY_DAY, tuple(BUILDS)))
    }


def built(place: Path, level: str, defined: tuple[str, ...]) -> Build:
    source, flags = compiler.SOURCE.with_name("packed_linear.c"), compiler.flags(compiler.LEVELS[level], "bfloat16")
    subprocess.run(["cc", *flags, *defined, "-Wno-psabi", "-shared", source, "-o", place], check=True)
    return Build(ctypes.CDLL(str(place)))


def numbers(shape: tuple[int, ...], kind: str) -> Tensor:
    powers = {"ordinary": (0, 1), "huge": (50, 127), "tiny": (-140, -50), "wild": (-133, 127)}[kind]
    found = torch.randn(shape) * torch.pow(2.0, torch.randint(*powers, shape).float())
    if kind == "wild":
        for chance, value in (
            (0.02, 0.0),
            (0.02, -0.0),
            (2e-3, float("inf")),
            (2e-3, -float("inf")),
            (1e-3, float("nan")),
        ):
            found[torch.rand(shape) < chance] = value
    return found.bfloat16()


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    same = found.view(torch.int32) == wanted.view(torch.int32)
    assert bool((same | (found.isnan() & wanted.isnan())).all())


def rounded(value: Fraction) -> Fraction:
    """The nearest float32, ties to even; a denormal one is 0."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    found = round(value / unit) * unit  # Python rounds ties to even
    return found if abs(found) >= SMALLEST else Fraction(0)


def defined(order: str, x: list[Fraction], w: list[Fraction], start: Fraction) -> Fraction:
    """The sum in one of the orders, step by step; x and w of whole blocks."""
    total = start
    for block in range(0, len(x), 32 if order == "blocks" else 2):
        if order == "dot":
            total = rounded(x[block + 1] * w[block + 1] + total)
            total = rounded(x[block] * w[block] + total)
            continue
        parts = [Fraction(0), Fraction(0)]
        for k in range(block, block + 32):
            parts[k % 2] = rounded(x[k] * w[k] + parts[k % 2])
        total = rounded(total + rounded(parts[0] + parts[1]))
    return total


def exact(numbers: Tensor, width: int) -> list[Fraction]:
    """The numbers as fractions, denormal ones as 0, with zeros up to `width` of them."""
    found = [Fraction(number) for number in numbers.tolist()]
    return [n if abs(n) >= SMALLEST else Fraction(0) for n in found] + [Fraction(0)] * (width - len(found))


@pytest.mark.crossed
@pytest.mark.parametrize("kind", ["ordinary", "tiny"])
@pytest.mark.parametrize("name", mostly_nightly(BUILDS, *BY_DAY))
def test_sums_are_the_defined_ones(orders: Mapping[str, Build], name: str, kind: str) -> None:
    torch.manual_seed(0)
    for width in (1, 2, 31, 32, 70, 97):
        x, weight, bias = numbers((3, width), kind), numbers((35, width), kind), torch.randn(35) * 2.0**-120
        found = orders[name].multiply(x, weight, bias)
        for row in range(3):
            wanted = [
                defined(
                    name.partition(",")[0], exact(x[row], 128), exact(weight[out], 128), *exact(bias[out : out + 1], 1)
                )
                for out in range(35)
            ]
            assert found[row].tolist() == [float(number) for number in wanted]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("order", ["dot", "blocks"])
def test_bits_are_the_same_by_every_build(orders: Mapping[str, Build], order: str, kind: str) -> None:
    first, *others = [build for name, build in orders.items() if name.startswith(order)]
    for seed, shape in enumerate(SHAPES):
        torch.manual_seed(seed)
        weight = numbers(shape, kind)
        for rows in ROWS:
            x, bias = numbers((rows, shape[1] + 3), kind)[:, : shape[1]], torch.randn(shape[0]) if rows % 2 else None
            wanted = first.multiply(x, weight, bias)
            for build in others:
                assert_same_bits(build.multiply(x, weight, bias), wanted)


@pytest.mark.crossed
@pytest.mark.parametrize("kind", ["ordinary", "wild"])
@pytest.mark.parametrize("name", mostly_nightly(BUILDS, *BY_DAY))
def test_bits_of_a_row_are_its_own(orders: Mapping[str, Build], name: str, kind: str) -> None:
    for seed, shape in enumerate(SHAPES):
        torch.manual_seed(seed)
        x, weight = numbers((40, shape[1] + 1), kind)[:, : shape[1]], numbers(shape, kind)
        alone = torch.cat([orders[name].multiply(x[row : row + 1], weight) for row in range(40)])
        for rows in ROWS:
            assert_same_bits(orders[name].multiply(x[40 - rows :], weight), alone[40 - rows :])


@pytest.mark.crossed
@pytest.mark.parametrize("rows", [1, 3, 97, 400])
@pytest.mark.parametrize("name", mostly_nightly(BUILDS, *BY_DAY))
def test_many_rows_are_rows(orders: Mapping[str, Build], name: str, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = numbers((rows, 4150), "ordinary"), numbers((70, 4150), "ordinary")
    found = orders[name].multiply(x, weight)
    wanted, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert bool(((found.double() - wanted).abs() <= 4152 * 2.0**-24 * size).all())
    assert_same_bits(orders[name].multiply(x[-1:], weight), found[-1:])


@pytest.mark.parametrize("name", mostly_nightly(BUILDS, *BY_DAY))
def test_others_keep_their_denormal_numbers(orders: Mapping[str, Build], name: str) -> None:
    small = torch.full((4,), 2.0**-130)
    product = orders[name].multiply(small.bfloat16()[None], torch.ones(1, 4).bfloat16())
    assert product.tolist() == [[0.0]]
    assert (small * 1.0).sum().item() == 2.0**-128


@pytest.mark.crossed
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_comes_back_bit_by_bit(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = numbers(shape, "wild")
    found = PackedLinear.of(weight).dense()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), weight.view(torch.int16))


@pytest.mark.crossed
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("shape", SHAPES)
def test_served_product_is_the_definition(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0])
    packed = PackedLinear.of(weight)
    for rows in (0, 1, 5, 40, 97):
        x = torch.randn(rows, shape[1]).bfloat16()
        found, wanted = packed(x, bias), x.double() @ weight.double().t() + bias.double()
        size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
        assert found.dtype == torch.float32
        assert bool(((found.double() - wanted).abs() <= (shape[1] + 2) * 2.0**-24 * size).all())
