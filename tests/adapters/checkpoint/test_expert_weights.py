"""The LoRA of single experts as one delta: each expert's [out, in] is the sum of scale * B A of its parts."""

from __future__ import annotations

import pytest
import torch

from lora_serve.adapters.checkpoint.bound import BoundExperts, BoundLinear
from lora_serve.adapters.checkpoint.saved import SavedDelta, SavedLinear
from lora_serve.adapters.checkpoint.weights import stack_experts
from lora_serve.core.model_spec import LinearShape

NUM_IN, NUM_OUT = 5, 3


def stacked(
    *parts: dict[int, tuple[int, float]], dtype: torch.dtype = torch.float32
) -> tuple[SavedDelta, dict[tuple[int, int], torch.Tensor]]:
    """`parts`: expert -> (rank, scale). The stack, and scale * B A in float64 by part and expert."""
    generator = torch.Generator().manual_seed(3)
    saved: dict[tuple[str | None, str | None], SavedLinear] = {}
    products, bound = {}, []
    for part, experts in enumerate(parts):
        bound.append({e: BoundLinear(f"{part}.{e}", "b", rank, scale) for e, (rank, scale) in experts.items()})
        for expert, (rank, scale) in experts.items():
            a, b = (torch.randn(rank, size, generator=generator).to(dtype) for size in (NUM_IN, NUM_OUT))
            saved[f"{part}.{expert}", "b"] = SavedLinear(a, b, scale)
            products[part, expert] = scale * (b.double().t() @ a.double())
    experts = BoundExperts(tuple(bound), 4, LinearShape(NUM_IN, NUM_OUT))
    return stack_experts(experts, lambda linear: saved[linear.a_name, linear.b_name]), products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_of_each_expert_is_its_own_product_and_the_rest_is_zero(dtype: torch.dtype) -> None:
    delta, products = stacked({0: (2, 1.5), 3: (4, 1.5)}, {0: (3, 0.7), 1: (1, 0.7)}, dtype=dtype)
    assert (delta.a.shape, delta.b.shape, delta.scale) == ((4, 7, NUM_IN), (4, 7, 2 * NUM_OUT), 1.5)
    full = delta.scale * (delta.b.double().mT @ delta.a.double())
    for expert in range(4):
        for part in range(2):
            truth = products.get((part, expert), torch.zeros(NUM_OUT, NUM_IN, dtype=torch.float64))
            assert torch.allclose(full[expert, part * NUM_OUT : (part + 1) * NUM_OUT], truth, atol=1e-6)


def test_factors_stay_as_they_were_saved_where_one_scale_serves_all() -> None:
    delta, _ = stacked({0: (2, 1.5)}, {1: (2, 1.5)}, dtype=torch.bfloat16)
    assert (delta.a.dtype, delta.b.dtype) == (torch.bfloat16, torch.bfloat16)
    other, _ = stacked({0: (2, 1.5)}, {1: (2, 0.7)}, dtype=torch.bfloat16)
    assert (other.a.dtype, other.b.dtype) == (torch.float32, torch.float32)


def test_scale_of_zero_silences_its_part_alone() -> None:
    delta, products = stacked({0: (2, 0.0)}, {0: (2, 3.0)})
    assert delta.scale == 3.0
    full = delta.scale * (delta.b.double().mT @ delta.a.double())
    assert not full[0, :NUM_OUT].any()
    assert torch.allclose(full[0, NUM_OUT:], products[1, 0], atol=1e-6)
