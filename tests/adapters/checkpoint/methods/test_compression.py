from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.adapters.checkpoint.methods.factors import Factors, compress, too_large
from tests.adapters.checkpoint.methods.peft_oracle import delta, distance

SHAPES = st.tuples(st.integers(10, 30), st.integers(10, 30), st.integers(9, 40), st.integers(1, 4), st.integers(0, 99))


def noise(rank: int, columns: int, rows: int, seed: int = 0, scale: float = 0.5) -> Factors:
    random = np.random.default_rng(seed)
    a, b = (random.standard_normal((rank, width)).astype(np.float32) for width in (columns, rows))
    return Factors(a, b, scale)


def redundant(true_rank: int, rank: int, columns: int, rows: int, seed: int) -> Factors:
    """Factors of `rank` whose product has `true_rank`."""
    random = np.random.default_rng(seed)
    mix = random.standard_normal((true_rank, rank))
    inner = noise(true_rank, columns, rows, seed)
    a, b = np.linalg.pinv(mix) @ inner.a, mix.T @ inner.b
    return Factors(a.astype(np.float32), b.astype(np.float32), inner.scale)


def svd_error(factors: Factors, rank: int) -> float:
    values = np.linalg.svd(delta(factors), compute_uv=False)
    return float(np.linalg.norm(values[rank:]) / np.linalg.norm(values))


@given(SHAPES)
def test_a_hidden_low_rank_is_found_exactly(case: tuple[int, int, int, int, int]) -> None:
    columns, rows, rank, true_rank, seed = case
    factors = redundant(true_rank, rank, columns, rows, seed)
    result = compress(factors, max_rank=8)
    assert result.factors is not None
    assert result.reason == ""
    assert result.factors.a.shape == (result.errors[0][0], columns)
    assert result.factors.b.shape == (result.errors[0][0], rows)
    assert result.factors.a.shape[0] <= true_rank
    assert distance(delta(result.factors), delta(factors)) < 1.1e-5


@given(SHAPES)
def test_noise_is_refused_with_the_error_numpy_finds(case: tuple[int, int, int, int, int]) -> None:
    columns, rows, rank, max_rank, seed = case
    factors = noise(min(rank, 8 * max_rank), columns, rows, seed)
    result = compress(factors, max_rank)
    assert result.factors is None
    (tried, error), (needed, small) = result.errors
    assert tried == max_rank < needed
    assert error == pytest.approx(svd_error(factors, max_rank), rel=1e-6)
    assert small <= 1e-5 < svd_error(factors, needed - 1)
    assert f"rank {max_rank} has a relative error of {error:.2g}; within 1e-05 needs {needed}" in result.reason


def test_the_lowest_rank_within_the_tolerance_is_taken() -> None:
    factors = noise(12, 20, 30)
    needed = next(rank for rank in range(12) if svd_error(factors, rank) <= 0.5)
    result = compress(factors, max_rank=11, tolerance=0.5)
    assert result.factors is not None
    assert result.factors.a.shape[0] == needed < 11
    assert distance(delta(result.factors), delta(factors)) == pytest.approx(svd_error(factors, needed), rel=1e-4)
    assert [rank for rank, _ in result.errors] == [needed, 11]


def test_factors_that_fit_are_left_alone() -> None:
    factors = noise(4, 6, 7)
    assert compress(factors, 4).factors is factors
    assert compress(factors, 4).errors == ((4, 0.0),)


def test_a_delta_of_zero_has_rank_one() -> None:
    zero = Factors(np.zeros((6, 5), np.float32), np.ones((6, 7), np.float32), 1.0)
    result = compress(zero, 2)
    assert result.factors is not None
    assert result.factors.a.shape == (1, 5)
    assert not delta(result.factors).any()


def test_far_too_large_a_rank_is_not_tried() -> None:
    factors = noise(17, 20, 20)
    result = compress(factors, 2)
    assert (result.factors, result.errors) == (None, ())
    assert result.reason == too_large(17, 2) != ""
    assert "17" in result.reason
    assert too_large(16, 2) == ""
