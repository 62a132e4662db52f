"""Mixtures of experts in one call: the formula in float64, a token's bits its own, weights that torch may ask for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lora_serve.model.native.experts import AS_IS, Layout, NativeExperts, PackedStack
from lora_serve.model.native.layer_kernels import CLAMPED, Gate
from tests.model.test_experts import CHOICES, NUM_EXPERTS

pytestmark = pytest.mark.usefixtures("build")
DTYPES = (torch.float32, torch.bfloat16)
TURNS = torch.cat([torch.arange(0, 34, 2), torch.arange(1, 34, 2)])
SIZES = ((40, 24), (32, 64), (70, 33))  # hidden, inner
GATES = (Gate("silu"), Gate("gelu_tanh"), Gate(CLAMPED, 1.702, 0.7, 1.0))


@dataclass
class Mixture:
    """Weights, and the same laid out."""

    up: Tensor  # [experts, 2 * inner, hidden]
    down: Tensor
    biases: tuple[Tensor, Tensor] | None
    gate: Gate
    native: NativeExperts

    @staticmethod
    def of(hidden: int, inner: int, dtype: torch.dtype, gate: Gate, *, has_bias: bool = False) -> Mixture:
        torch.manual_seed(0)
        up = (torch.randn(NUM_EXPERTS, 2 * inner, hidden) / hidden**0.5).to(dtype)
        down = (torch.randn(NUM_EXPERTS, hidden, inner) / inner**0.5).to(dtype)
        biases = (torch.randn(NUM_EXPERTS, 2 * inner), torch.randn(NUM_EXPERTS, hidden)) if has_bias else None
        return Mixture(up, down, biases, gate, NativeExperts(PackedStack(up), PackedStack(down), gate, biases))

    def expected(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The formula, with one rounding between the products."""
        y = torch.zeros(x.shape).double()
        for token, own in enumerate(chosen.tolist()):
            for weight, expert in zip(weights[token].double(), own, strict=True):
                if not 0 <= expert < NUM_EXPERTS:
                    continue
                both = self.up[expert].double() @ x[token].double()
                both = both if self.biases is None else both + self.biases[0][expert].double()
                inner = gated(self.gate, *both.chunk(2)).to(x.dtype).double()
                out = self.down[expert].double() @ inner
                y[token] += weight * (out if self.biases is None else out + self.biases[1][expert].double())
        return y


def gated(gate: Gate, x: Tensor, up: Tensor) -> Tensor:
    """The definitions of transformers: Llama's, Gemma's and gpt-oss's."""
    if gate.activation == CLAMPED:
        low, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return (up + gate.offset) * (low * torch.sigmoid(gate.alpha * low))
    return up * (F.silu(x) if gate.activation == "silu" else F.gelu(x, approximate="tanh"))


def inputs(name: str, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    chosen = torch.tensor(CHOICES[name])
    return torch.randn(len(chosen), hidden).to(dtype), chosen, torch.rand(chosen.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHOICES)
def test_experts_are_the_formula(name: str, dtype: torch.dtype) -> None:
    for (hidden, inner), gate in zip(SIZES, GATES, strict=True):
        mixture = Mixture.of(hidden, inner, dtype, gate, has_bias=gate.activation == CLAMPED)
        given = inputs(name, hidden, dtype)
        found, wanted = mixture.native(*given), mixture.expected(*given)
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_token_are_its_own(dtype: torch.dtype) -> None:
    mixture = Mixture.of(70, 33, dtype, Gate("silu"))
    x, chosen, weights = inputs("300 tokens", 70, dtype)
    together = mixture.native(x, chosen, weights)
    for first, end in ((0, 1), (17, 18), (40, 97), (299, 300)):
        here = slice(first, end)
        assert torch.equal(mixture.native(x[here], chosen[here], weights[here]), together[here])
    order = torch.randperm(len(x))
    assert torch.equal(mixture.native(x[order], chosen[order], weights[order]), together[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_that_is_not_a_number_stays_alone(dtype: torch.dtype) -> None:
    for gate in GATES:
        mixture = Mixture.of(40, 24, dtype, gate)
        x, chosen, weights = inputs("ragged", 40, dtype)
        clean = mixture.native(x, chosen, weights)
        x[7] = torch.nan
        found = mixture.native(x, chosen, weights)
        assert found[7].isnan().all()
        others = [i for i in range(len(x)) if i != 7]
        assert torch.equal(found[others], clean[others])


def test_expert_that_is_none_adds_nothing() -> None:
    mixture = Mixture.of(40, 24, torch.float32, Gate("silu"))
    x, weights = torch.randn(3, 40), torch.rand(3, 2)
    chosen = torch.tensor([[1, NUM_EXPERTS], [-1, NUM_EXPERTS], [NUM_EXPERTS, 3]])
    found = mixture.native(x, chosen, weights)
    assert torch.allclose(found.double(), mixture.expected(x, chosen, weights), atol=1e-5)
    assert not found[1].any()
    assert mixture.native(x[:0], chosen[:0], weights[:0]).shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [AS_IS, Layout(True), Layout(True, TURNS), Layout(False, TURNS)])
def test_stack_in_panels_is_a_weight_to_torch_as_its_model_keeps_it(dtype: torch.dtype, layout: Layout) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, *((20, 34) if layout.is_transposed else (34, 20))).to(dtype)
    stack, x, bias = PackedStack(weight, layout), torch.randn(5, 20).to(dtype), torch.randn(34).to(dtype)
    multiply = torch.matmul if layout.is_transposed else F.linear
    assert (stack.shape, stack.dtype, stack.dim()) == (weight.shape, dtype, 3)
    assert torch.equal(stack.dense(), weight)
    for expert in (0, torch.tensor(2)):
        own = stack[expert]
        assert own.shape == weight[expert].shape
        assert torch.allclose(multiply(x, own), multiply(x, weight[expert]), atol=1e-5, rtol=2e-2)
        if not layout.is_transposed:
            assert torch.allclose(F.linear(x, own, bias), F.linear(x, weight[expert], bias), atol=1e-5, rtol=2e-2)
        wide = multiply(x.float(), own.type(torch.float32))
        assert torch.allclose(wide, multiply(x.float(), weight[expert].float()), atol=1e-5)
        assert torch.equal(torch.add(own, 1), weight[expert] + 1)
        assert torch.equal(own.t(), weight[expert].t())
