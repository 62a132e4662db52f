"""Adapters of bfloat16 on inputs of bfloat16: x A^T is rounded, and both products are of the order that is written
down, with the instructions and without.
"""

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
from lora_serve.model.step_context import PIECE
from tests.model.native.test_bfloat16_products import (
    BUILDS,
    BY_DAY,
    NUMBERS,
    assert_same_bits,
    defined,
    exact,
    numbers,
    rounded,
)
from tests.tiers import by_tier, mostly_nightly

SHAPES = [(1, 1, 1), (7, 3, 2), (70, 35, 3), (64, 99, 16), (33, 64, 31), (97, 40, 33), (576, 65, 8), (1040, 33, 70)]
TOKENS = (1, 2, 3, 4, 5, 7, PIECE)
LANES = 16  # sums of x A^T in the order "dot"


@dataclass(frozen=True, slots=True)
class Build:
    """`lora.c` by itself, compiled for one level."""

    library: Any

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """y + scale * (x A^T) B, and nothing written beyond it."""
        tokens, out = y.shape
        found = torch.full((tokens * out + 64,), 7.0)
        found[: tokens * out] = y.flatten()
        piece = torch.tensor([[0, tokens, 0]], dtype=torch.int32)
        addresses = [torch.tensor([place]) for place in (a.data_ptr(), b.data_ptr(), 0, 0)]
        rank, kind = torch.tensor([len(a)], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        tables = (*addresses, rank, torch.tensor([scale]), kind)
        size, address = ctypes.c_int64, ctypes.c_void_p
        self.library.lora_add(
            address(x.data_ptr()), size(x.stride(0)), address(found.data_ptr()), size(out), size(x.shape[1]), size(out),
            address(piece.data_ptr()), size(1), None, *(address(table.data_ptr()) for table in tables),
        )  # fmt: skip
        assert bool((found[tokens * out :] == 7.0).all())
        return found[: tokens * out].view(tokens, out)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Build]:
    folder = tmp_path_factory.mktemp("build")
    return {
        name: built(folder / f"{number}.so", *BUILDS[name])
        for number, name in enumerate(by_tier(BY_DAY, tuple(BUILDS)))
    }


def built(place: Path, level: str, defined: tuple[str, ...]) -> Build:
    source, flags = compiler.SOURCE.with_name("lora.c"), compiler.flags(compiler.LEVELS[level], "bfloat16")
    subprocess.run(["cc", *flags, "-O2", *defined, "-w", "-shared", source, "-o", place], check=True)
    return Build(ctypes.CDLL(str(place)))


def case(tokens: int, shape: tuple[int, int, int], kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, x, A and B of inputs, outputs and a rank."""
    width, out, rank = shape
    x = numbers((tokens, width + 3), kind)[:, :width]
    return torch.randn(tokens, out), x, numbers((rank, width), kind), numbers((rank, out), kind)


def shrunk(order: str, x: Tensor, a: Tensor) -> Fraction:
    """x . a of one token and rank, before it is scaled."""
    if order == "blocks":
        return defined(order, exact(x, -(-len(x) // 32) * 32), exact(a, -(-len(a) // 32) * 32), Fraction(0))
    width = -(-len(x) // (2 * LANES)) * 2 * LANES
    inputs, weights, total = exact(x, width), exact(a, width), Fraction(0)
    for lane in range(LANES):
        own = [k + i for k in range(2 * lane, width, 2 * LANES) for i in (0, 1)]
        total = rounded(total + defined(order, [inputs[k] for k in own], [weights[k] for k in own], Fraction(0)))
    return total


@pytest.mark.crossed
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", mostly_nightly(BUILDS, *BY_DAY))
def test_sums_are_the_defined_ones(orders: Mapping[str, Build], name: str, tokens: int) -> None:
    order = name.partition(",")[0]
    unit = 32 if order == "blocks" else 2
    for seed, shape in enumerate([(70, 34, 3), (31, 3, 33), (64, 32, 16)]):
        torch.manual_seed(seed)
        y, x, a, b = case(tokens, shape, "ordinary")
        found, rank = orders[name].add(y, x, a, b, 0.3), -(-len(a) // unit) * unit
        scale = torch.tensor(0.3)
        for t in range(tokens):
            s = torch.stack([scale * float(shrunk(order, x[t], row)) for row in a]).bfloat16()
            wanted = [
                defined(order, exact(s, rank), exact(b[:, o].contiguous(), rank), Fraction(y[t, o].item()))
                for o in range(shape[1])
            ]
            assert found[t].tolist() == [float(number) for number in wanted]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("order", ["dot", "blocks"])
def test_bits_are_the_same_by_every_build_and_number_of_tokens(
    orders: Mapping[str, Build], order: str, kind: str
) -> None:
    own = [build for name, build in orders.items() if name.startswith(order)]
    for seed, shape in enumerate(SHAPES):
        torch.manual_seed(seed)
        y, x, a, b = case(PIECE, shape, kind)
        wanted = torch.cat([own[0].add(y[t : t + 1], x[t : t + 1], a, b, 0.3) for t in range(PIECE)])
        for build in own:
            for tokens in TOKENS:
                assert_same_bits(build.add(y[:tokens], x[:tokens], a, b, 0.3), wanted[:tokens])


@pytest.mark.parametrize("name", mostly_nightly(BUILDS, *BY_DAY))
def test_delta_of_a_high_rank_is_the_formula(orders: Mapping[str, Build], name: str) -> None:
    torch.manual_seed(0)
    y, x, a, b = case(PIECE, (96, 40, 1030), "ordinary")
    s = (x.double() @ a.double().t()) * 0.3
    wanted, size = y.double() + s @ b.double(), s.abs() @ b.double().abs()
    for tokens in (1, PIECE):
        found = orders[name].add(y[:tokens], x[:tokens], a, b, 0.3)
        assert bool(((found.double() - wanted[:tokens]).abs() <= 2.0**-8 * size[:tokens]).all())
