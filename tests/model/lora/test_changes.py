"""A low-rank change of a weight, whatever a model's code asks of the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lora_serve.model.lora.changes import LowRankWeight

USES: tuple[Callable[[torch.Tensor, Any], torch.Tensor], ...] = (
    F.linear,
    lambda x, weight: F.linear(x.double(), weight.type(torch.float64)),
    lambda x, weight: F.linear(x, weight.float()),
    lambda x, weight: F.linear(x.to(weight.dtype), weight),
    lambda x, weight: F.linear(x, weight=weight),
    lambda x, weight: F.linear(x.double(), weight.to(torch.float64)),
    lambda x, weight: F.linear(x, weight.to(device=x.device)),
    lambda x, weight: x @ weight.t(),
    lambda x, weight: x @ weight.mT,
    lambda x, weight: torch.matmul(x, torch.transpose(weight, 0, 1)),
    lambda x, weight: torch.einsum("th,eh->te", x, weight),
    lambda x, weight: F.linear(F.normalize(x, dim=-1), F.normalize(weight, dim=-1)),
    lambda x, weight: F.linear(x, torch.mul(weight, 2.0), bias=x[0, :8]),
    lambda x, weight: F.linear(x, weight, x[0, :8]),
    lambda x, weight: F.linear(x, weight, bias=x[0, :8]),
    lambda x, weight: x.new_full((len(x), weight.size(0)), weight.dim()),
)


@pytest.mark.parametrize("use", USES)
def test_any_use_of_the_weight_sees_the_sum(use: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, base, a, b = (torch.randn(shape, generator=generator) for shape in ((5, 16), (8, 16), (2, 16), (2, 8)))
    expected = use(x, base + 0.5 * b.t() @ a)
    assert torch.allclose(use(x, LowRankWeight(base, b, a, 0.5)), expected, atol=1e-5)


@pytest.mark.parametrize(
    "use", [lambda x, weight: x @ weight, torch.matmul, torch.bmm, lambda x, weight: x[1] @ weight[1], torch.Tensor.bmm]
)
def test_products_with_weights_that_lie_in_by_out_form_none_of_them(
    use: Callable[[torch.Tensor, Any], torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, base, a, b = (
        torch.randn(shape, generator=generator) for shape in ((3, 5, 16), (3, 16, 8), (3, 2, 16), (3, 2, 8))
    )
    weight = LowRankWeight(base, a, b, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRankWeight, "_formed", None)
        found = use(x, weight)
    assert torch.allclose(found, use(x, base + 0.5 * a.mT @ b), atol=1e-5)


def test_row_of_a_matrix_is_that_of_the_sum() -> None:
    base, a, b = torch.randn(4, 8), torch.randn(2, 8), torch.randn(2, 4)
    assert torch.allclose(LowRankWeight(base, b, a, 0.5)[2], (base + 0.5 * b.t() @ a)[2], atol=1e-6)


def test_stack_of_experts_is_not_formed_as_a_whole() -> None:
    stack = LowRankWeight(torch.randn(3, 8, 16), torch.randn(3, 2, 8), torch.randn(3, 2, 16), 0.5)
    with pytest.raises(TypeError, match="not formed all at once"):
        torch.bmm(torch.randn(3, 5, 16), stack.mT)
    assert stack[1].float().shape == (8, 16)
