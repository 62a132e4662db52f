"""Products from packed weights: the definition in float64, and bits that are a row's own."""

from __future__ import annotations

import pytest
import torch

from lora_serve.model.native.operators import PackedLinear, PanelKind, join, why_not

pytestmark = pytest.mark.usefixtures("build")
SHAPES = [(1, 1), (7, 3), (16, 16), (31, 33), (32, 64), (40, 513), (161, 70), (130, 1030)]  # out, in
ROWS = (0, 1, 2, 5, 6, 7, 12, 13, 97, 200)


def weight_of(shape: tuple[int, int], *, is_exact: bool) -> torch.Tensor:
    weight = torch.randn(shape)
    return weight.bfloat16().float() if is_exact else weight


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """Within the error bound of a sum of so many float32 products (Higham, Accuracy and Stability, 3.1)."""
    terms = weight.shape[1] + 2
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert y.shape == exact.shape
    assert bool(((y.double() - exact).abs() <= terms * 2.0**-24 * size).all())


@pytest.mark.crossed
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_exact", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_product_is_the_definition(shape: tuple[int, int], is_exact: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = weight_of(shape, is_exact=is_exact), torch.randn(shape[0]) if has_bias else None
    packed = PackedLinear.of(weight)
    assert packed.kind is (PanelKind.PAIRS if is_exact else PanelKind.FLOATS)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        check(x, weight, bias, packed(x, bias))


def test_input_may_lie_anywhere() -> None:
    weight = torch.randn(40, 24)
    packed = PackedLinear.of(weight)
    wide = torch.randn(18, 50)
    for x in (wide[:, 3:27], wide[::3, 3:27], wide[:1, 5:29], torch.randn(24, 9).t(), wide[:1, :24].expand(7, 24)):
        check(x, weight, None, packed(x, None))
    assert torch.equal(packed(wide.view(2, 9, 50)[..., :24], None).flatten(0, 1), packed(wide[:, :24], None))


@pytest.mark.crossed
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_exact", [True, False], ids=["bfloat16", "float32"])
def test_weight_comes_back_bit_by_bit(shape: tuple[int, int], is_exact: bool) -> None:
    weight = weight_of(shape, is_exact=is_exact)
    weight[0, 0] = -0.0
    found = PackedLinear.of(weight).dense()
    assert torch.equal(found.view(torch.int32), weight.view(torch.int32))


@pytest.mark.crossed
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_exact", [True, False], ids=["bfloat16", "float32"])
def test_bits_of_a_row_are_its_own(shape: tuple[int, int], is_exact: bool) -> None:
    torch.manual_seed(1)
    packed, bias = PackedLinear.of(weight_of(shape, is_exact=is_exact)), torch.randn(shape[0])
    x = torch.randn(200, shape[1])
    together = packed(x, bias)
    for first, end in ((0, 1), (199, 200), (3, 5), (0, 95), (96, 97), (95, 105), (50, 163)):
        assert torch.equal(packed(x[first:end], bias), together[first:end])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_row_that_is_not_finite_reaches_no_other(bad: float) -> None:
    packed, x = PackedLinear.of(torch.randn(40, 24).abs()), torch.randn(9, 24)
    clean = packed(x, None)
    x[4, 7] = bad
    found = packed(x, None)
    assert not found[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("is_exact", [True, False], ids=["bfloat16", "float32"])
def test_joined_weights_are_each_and_all(is_exact: bool) -> None:
    weights = [weight_of((out, 24), is_exact=is_exact) for out in (64, 32, 40)]
    found = join([PackedLinear.of(weight) for weight in weights])
    assert found is not None
    together, parts = found
    x = torch.randn(5, 24)
    y = together(x, None)
    assert torch.equal(together.dense(), torch.cat(weights))
    for weight, (columns, part) in zip(weights, parts, strict=True):
        assert torch.equal(part.dense(), weight)
        assert torch.equal(part(x, None), y[:, columns])
        assert part.panels.untyped_storage().data_ptr() == together.panels.untyped_storage().data_ptr()
    check(x, torch.cat(weights), None, y)


def test_weights_that_do_not_fit_are_not_joined() -> None:
    exact, other = (PackedLinear.of(weight_of((32, 24), is_exact=is_exact)) for is_exact in (True, False))
    odd = PackedLinear.of(weight_of((33, 24), is_exact=True))
    deeper = PackedLinear.of(weight_of((32, 25), is_exact=True))
    assert join([exact, other]) is None
    assert join([exact, deeper]) is None
    assert join([odd, exact]) is None
    assert join([exact, odd]) is not None


def test_what_cannot_be_packed_is_told() -> None:
    assert why_not(torch.zeros(3, 4)) is None
    assert why_not(torch.zeros(3, 4, dtype=torch.bfloat16)) is None
    assert "float32" in str(why_not(torch.zeros(3, 4, dtype=torch.float16)))
    assert "empty" in str(why_not(torch.zeros(3, 0)))
    assert "CPU" in str(why_not(torch.zeros(3, 4, device="meta")))
