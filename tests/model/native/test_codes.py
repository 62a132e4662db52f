"""K and V of one byte a number, as the kernels store them."""

from __future__ import annotations

import math

import pytest
import torch

from lora_serve.model.kv_format import KVFormat
from lora_serve.model.native.layer_kernels import LayerKernels
from tests.model.test_kv_format import CODED, rows_of

pytestmark = pytest.mark.usefixtures("build")


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
@pytest.mark.parametrize(("size", "bad"), [(7, 0.0), (20, math.inf), (64, math.nan)])
def test_kernels_store_the_same_bits_as_torch(form: KVFormat, size: int, bad: float) -> None:
    numbers, places = rows_of(size), torch.arange(30) + 3
    numbers[7, 0, 2] = bad
    wanted = form.encode(numbers, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        pools = torch.zeros(2, 40, *wanted.shape[1:], dtype=torch.uint8)
        nothing = torch.zeros(30, 0)
        LayerKernels.load(dtype).rotate_store(
            numbers.clone(), numbers.clone(), numbers, nothing, nothing, places, (pools[0], pools[1]),
            form,
        )  # fmt: skip
        for pool in pools:
            is_number = wanted[..., -4:].contiguous().view(torch.float32)[..., 0].isfinite()
            assert torch.equal(pool[3:33][is_number], wanted[is_number])
            scales = pool[3:33][~is_number][..., -4:].contiguous().view(torch.float32)
            assert scales.isnan().all()
            assert not pool[:3].any()
