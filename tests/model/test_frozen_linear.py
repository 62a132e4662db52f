"""The frozen layer multiplies, and tells its rows' norms, as the layer it was made from: all kinds of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup
from transformers.pytorch_utils import Conv1D

from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.loading.float8 import Float8Linear
from lora_serve.model.loading.number_type import resident_bytes, torchao_scheme
from lora_serve.model.loading.observation import linear_shape

IN, OUT = 320, 96  # more than one chunk of unit vectors


class Int8Layer(nn.Linear):
    """A layer as bitsandbytes makes them: the parameter holds bytes, maybe in another shape; the class reads them."""

    def __init__(self, source: nn.Linear, shape: tuple[int, ...] = (-1, 1)) -> None:
        super().__init__(source.in_features, source.out_features)
        self.bias = source.bias
        codes, self.scale = (source.weight * 100).round().clamp(-127, 127), 0.01
        self.weight = nn.Parameter(codes.to(torch.int8).reshape(shape), requires_grad=False)

    def dequantised(self) -> Tensor:
        return self.weight.view(self.out_features, self.in_features).float() * self.scale

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.dequantised(), self.bias)


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(IN, OUT, bias=bias, dtype=dtype).requires_grad_(False)


def quantised(name: str) -> nn.Linear:
    layer = linear()
    groups = PerGroup(32)
    quantize_(layer, torchao_scheme(name) if name == "int8" else IntxWeightOnlyConfig(torch.int4, granularity=groups))
    return layer


def conv() -> Conv1D:
    torch.manual_seed(1)
    layer = Conv1D(OUT, IN).requires_grad_(False)
    layer.bias.normal_()
    return layer


def float8(scale_of: tuple[int, ...]) -> Float8Linear:
    source = linear()
    numbers = (source.weight * 1000).to(torch.float8_e4m3fn)
    torch.manual_seed(3)
    return Float8Linear(source, numbers, torch.rand(scale_of) / 500)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "without bias": lambda: linear(bias=False),
    "bfloat16": lambda: linear(dtype=torch.bfloat16),
    "float16": lambda: linear(dtype=torch.float16),
    "conv1d": conv,
    "int8": lambda: quantised("int8"),
    "int4": lambda: quantised("int4"),
    "packed by its class": lambda: Int8Layer(linear()),
    "bytes of its class": lambda: Int8Layer(linear(), (OUT, IN)),
    "float8": lambda: float8((OUT, 1)),
    "float8 with one scale": lambda: float8((1,)),
}


def columns(layer: nn.Module) -> Tensor:
    """W [out, in] float32 as the untouched layer multiplies by it."""
    dtype = torch.float32 if layer.weight.dtype.itemsize == 1 else layer.weight.dtype
    zero = layer(torch.zeros(1, IN, dtype=dtype)).float()
    return (layer(torch.eye(IN, dtype=dtype)).float() - zero).T


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def activations(kind: str) -> Tensor:
    torch.manual_seed(2)
    x = torch.randn(7, IN)
    return x.to(getattr(torch, kind)) if kind in ("bfloat16", "float16") else x


@torch.inference_mode()
def test_layer_multiplies_as_its_source(kind: str) -> None:
    x, expected = activations(kind), KINDS[kind]()(activations(kind))
    frozen = FrozenLinear(KINDS[kind]())
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3}.get(kind, 1e-5)
    assert frozen(x[None]).shape == (1, 7, OUT)
    assert torch.allclose(frozen(x[None])[0].float(), expected.float(), atol=tolerance)


@torch.inference_mode()
def test_product_leaves_the_bias_out(kind: str) -> None:
    x, source = activations(kind), KINDS[kind]()
    bias = torch.zeros(OUT) if source.bias is None else source.bias.float().clone()
    expected = source(x).float() - bias
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3}.get(kind, 1e-5)
    assert torch.allclose(FrozenLinear(source).product(x).float(), expected, atol=tolerance)


@torch.inference_mode()
def test_square_norms_are_those_of_the_dequantised_rows(kind: str) -> None:
    expected = columns(KINDS[kind]()).square().sum(1)
    found = FrozenLinear(KINDS[kind]()).row_square_norms()
    assert found.dtype == torch.float32
    assert found.shape == (OUT,)
    assert torch.allclose(found, expected, rtol={"bfloat16": 1e-2, "float16": 1e-3}.get(kind, 1e-4))


def test_square_norms_are_worked_out_once() -> None:
    frozen = FrozenLinear(linear())
    assert frozen.row_square_norms() is frozen.row_square_norms()


def test_weight_that_is_an_embedding_too_is_not_copied() -> None:
    source = linear()
    frozen = FrozenLinear(source, shared_weight=True)
    assert frozen.weight.stored.data_ptr() == source.weight.data_ptr()
    assert torch.allclose(frozen.row_square_norms(), source.weight.square().sum(1))


@torch.inference_mode()
def test_sums_of_bfloat16_are_float32_until_they_are_rounded_once() -> None:
    source = linear(dtype=torch.bfloat16)
    source.bias.data = torch.randn(OUT).bfloat16()
    x = torch.randn(7, IN).bfloat16()
    frozen = FrozenLinear(source, shared_weight=True)
    assert frozen.packed is not None  # an output head that is the embedding too
    exact = x.double() @ source.weight.double().t() + source.bias.double()
    assert frozen.sums(x).dtype == torch.float32
    assert torch.allclose(frozen.sums(x).double(), exact, atol=1e-4)
    assert torch.equal(frozen(x), frozen.sums(x).bfloat16())
    assert not torch.allclose(frozen(x).double(), exact, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantised_weights_are_kept_as_they_are(name: str) -> None:
    source = quantised(name)
    frozen = FrozenLinear(source)
    assert type(frozen.weight.weight) is type(source.weight)
    assert frozen.weight.weight.qdata.data_ptr() == source.weight.qdata.data_ptr()


def test_shape_is_the_layers_own_not_that_of_its_packed_weight() -> None:
    layer = Int8Layer(linear())
    shape = linear_shape(layer)
    assert (shape.in_features, shape.out_features) == (IN, OUT)
    assert resident_bytes(layer) == IN * OUT + 4 * OUT


def test_scales_that_bitsandbytes_keeps_beside_a_weight_are_counted() -> None:
    class State:
        def __init__(self, absmax: Tensor, state2: State | None) -> None:
            self.absmax, self.code, self.state2 = absmax, torch.zeros(16), state2

    layer = Int8Layer(linear())
    before = resident_bytes(layer)
    layer.weight.quant_state = State(torch.zeros(100, dtype=torch.uint8), State(torch.zeros(5), None))  # type: ignore
    assert resident_bytes(layer) == before + 100 + 64 + 4 * 5 + 64
