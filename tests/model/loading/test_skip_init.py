"""Weights without memory are not drawn, all other numbers of a model are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_serve.model.loading.checkpoint_files import SkipInit

RANGES = [((5,), {}), ((0, 7, 2), {"dtype": torch.int64}), ((1.0, 2.0, 0.3), {}), ((0, 8, 2), {"dtype": torch.float16})]


@pytest.mark.parametrize(("arguments", "keywords"), RANGES)
def test_range_in_a_model_without_memory_has_its_numbers(
    arguments: tuple[float, ...], keywords: dict[str, torch.dtype]
) -> None:
    expected = torch.arange(*arguments, **keywords)
    with SkipInit(), torch.device("meta"):
        found = torch.arange(*arguments, **keywords)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_range_with_memory_has_its_numbers() -> None:
    with SkipInit():
        assert torch.arange(4).tolist() == [0, 1, 2, 3]


def test_weights_with_memory_are_drawn() -> None:
    with SkipInit():
        weight = nn.init.normal_(torch.zeros(8))
        assert nn.init.normal_(torch.zeros(8, device="meta")).is_meta
    assert bool((weight != 0).all())
