"""A model is built without numbers where it has no memory, and with them where it has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_serve.model.loading.frozen_model import SkipInit

RANGES = [((5,), {}), ((0, 7, 2), {"dtype": torch.int64}), ((1.0, 2.0, 0.3), {}), ((0, 8, 2), {"dtype": torch.float16})]


@pytest.mark.parametrize(("arguments", "keywords"), RANGES)
def test_range_without_memory_has_the_form_of_one_with_it(
    arguments: tuple[float, ...], keywords: dict[str, torch.dtype]
) -> None:
    expected = torch.arange(*arguments, **keywords)
    with torch.device("meta"), SkipInit():
        inside = torch.arange(*arguments, **keywords)
    with SkipInit(), torch.device("meta"):
        found = torch.arange(*arguments, **keywords)
    for one in (found, inside):
        assert one.is_meta
        assert (one.shape, one.dtype) == (expected.shape, expected.dtype)


def test_range_with_memory_has_its_numbers() -> None:
    with SkipInit():
        assert torch.arange(4).tolist() == [0, 1, 2, 3]


def test_weights_with_memory_are_drawn() -> None:
    with SkipInit():
        weight = nn.init.normal_(torch.zeros(8))
        assert nn.init.normal_(torch.zeros(8, device="meta")).is_meta
    assert bool((weight != 0).all())
