"""LoHa and LoKr tensors that do not fit the layer or the config are named; those that do tell their rank."""

from __future__ import annotations

import numpy as np
import pytest

from lora_serve.adapters.checkpoint.methods import loha, lokr
from lora_serve.core.errors import InvalidAdapterError

PLAN = {"m": (2, 4.0)}
LOHA = {"hada_w1_a": (9, 2), "hada_w1_b": (2, 8), "hada_w2_a": (9, 2), "hada_w2_b": (2, 8)}
LOKR = {"lokr_w1": (3, 2), "lokr_w2_a": (3, 2), "lokr_w2_b": (2, 4)}  # 9 x 8


def test_the_rank_of_a_loha_is_squared_up_to_the_smaller_side() -> None:
    assert loha.bind(PLAN, "m", LOHA, 8, 9) == 4
    shapes = {"hada_w1_a": (9, 2), "hada_w1_b": (2, 3), "hada_w2_a": (9, 2), "hada_w2_b": (2, 3)}
    assert loha.bind(PLAN, "m", shapes, 3, 9) == 3


@pytest.mark.parametrize("role", LOHA)
def test_a_missing_or_misshapen_loha_tensor_is_named(role: str) -> None:
    missing = {other: shape for other, shape in LOHA.items() if other != role}
    assert loha.bind(PLAN, "m", missing, 8, 9) == [f"{role} of m is missing"]
    reasons = loha.bind(PLAN, "m", LOHA | {role: LOHA[role][::-1]}, 8, 9)
    assert isinstance(reasons, list)
    assert [reason.split()[0] for reason in reasons] == [role]


def test_tensors_of_convolutions_are_refused() -> None:
    assert loha.bind(PLAN, "m", LOHA | {"hada_t1": (2, 2, 3, 3)}, 8, 9) == [
        "hada_t1 of m does not belong to a linear layer"
    ]
    assert lokr.bind(PLAN, "m", LOKR | {"lokr_t2": (2, 2, 3, 3)}, 8, 9) == [
        "lokr_t2 of m does not belong to a linear layer"
    ]


@pytest.mark.parametrize(
    ("shapes", "rank"),
    [
        (LOKR, 2 * 2),
        ({"lokr_w1": (3, 2), "lokr_w2": (3, 4)}, 2 * 3),
        ({"lokr_w1_a": (3, 2), "lokr_w1_b": (2, 2), "lokr_w2": (3, 4)}, 2 * 3),
        ({"lokr_w1_a": (1, 2), "lokr_w1_b": (2, 2), "lokr_w2": (9, 4)}, 1 * 4),
    ],
)
def test_the_rank_of_a_lokr_is_the_product_of_the_inner_dimensions(
    shapes: dict[str, tuple[int, ...]], rank: int
) -> None:
    assert lokr.bind(PLAN, "m", shapes, 8, 9) == rank


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"lokr_w1": (3, 2)}, "lokr_w2 of m must be there"),
        ({"lokr_w1": (3, 2), "lokr_w2_a": (3, 2)}, "lokr_w2 of m must be there"),
        (LOKR | {"lokr_w2": (3, 4)}, "lokr_w2 of m must be there"),
        (LOKR | {"lokr_w1": (3, 2, 1)}, "not two positive dimensions"),
        (LOKR | {"lokr_w1": (0, 2)}, "not two positive dimensions"),
        (LOKR | {"lokr_w2_a": (3, 5), "lokr_w2_b": (5, 4)}, "the config's rank is 2"),
        (LOKR | {"lokr_w2_a": (3, 1)}, "the config's rank is 2"),
        (LOKR | {"lokr_w1": (2, 3)}, r"has shape \[6, 12\].*asks for \[9, 8\]"),
    ],
)
def test_lokr_tensors_that_do_not_fit_are_named(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    reasons = lokr.bind(PLAN, "m", shapes, 8, 9)
    assert isinstance(reasons, list)
    assert len(reasons) == 1
    with pytest.raises(InvalidAdapterError, match=words):
        raise InvalidAdapterError(reasons)


def test_products_too_large_for_float32_are_refused() -> None:
    tensors = {role: np.full(shape, 1e30, np.float32) for role, shape in LOHA.items()}
    with pytest.raises(InvalidAdapterError, match="the weights of m multiply to values too large"):
        loha.factors(PLAN, "m", tensors, 8, 9)
