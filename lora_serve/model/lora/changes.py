"""The effects of an adapter on a module beside a linear layer's low-rank delta: one class per kind.

Each is applied to the tokens of the rows that use it, after the base module has run for all rows, and writes only their
outputs. `inputs` are the module's own positional arguments, `y` its output, both cut to those tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lora_serve.model.experts import ADAPTERS
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.native.experts import PRODUCTS, PackedMatrix, PackedStack


class Change(Protocol):
    """The effect of one adapter on one module."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the change alone, the base model's not counted."""

    def to(self, device: torch.device) -> Change:
        """The change with its tensors on a device."""

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        """Changes `y` in place. `scale`: the request's own, 1.0 unless adapters are composed."""


@dataclass(frozen=True, slots=True)
class TensorFields:
    """The base of dataclasses whose memory is that of their tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device) -> Self:
        """The same with its tensors on a device; where they are there already, the same tensors."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class EmbeddingDelta(TensorFields):
    """y = gain * y + scale * A[token] B (gain None: one)."""

    a: Tensor  # [num_embeddings, rank]
    b: Tensor  # [rank, embedding_dim]
    scale: float
    gain: Tensor | None = None  # [embedding_dim], DoRA's magnitude / norm

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        if self.gain is not None:
            y.mul_(self.gain)
        y.add_(F.embedding(inputs[0], self.a) @ self.b, alpha=self.scale * scale)


@dataclass(frozen=True, slots=True)
class TokenRows(TensorFields):
    """An embedding's own rows for some tokens: y = rows[j] where the token is token_ids[j]."""

    token_ids: Tensor  # [num_rows] int64, ascending
    rows: Tensor  # [num_rows, embedding_dim]

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        assert scale == 1.0, "only deltas can be scaled"
        tokens = inputs[0].flatten()
        which = torch.searchsorted(self.token_ids, tokens).clamp_(max=len(self.token_ids) - 1)
        where = (self.token_ids[which] == tokens).nonzero()[:, 0]
        y.view(-1, y.shape[-1])[where] = self.rows[which[where]].to(y.dtype)


@dataclass(frozen=True, slots=True)
class HeadRows(TensorFields):
    """The output head's own rows for some tokens: y[token_ids[j]] = x rows[j]^T."""

    token_ids: Tensor  # [num_rows] int64
    rows: Tensor  # [num_rows, in_features]
    is_shared: bool = True  # they are those of TokenRows (the head is tied), and counted there

    @property
    def num_bytes(self) -> int:
        return 0 if self.is_shared else self.token_ids.nbytes + self.rows.nbytes

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        assert scale == 1.0, "only deltas can be scaled"
        y[..., self.token_ids] = F.linear(inputs[0].to(y.dtype), self.rows.to(y.dtype))


class Twin:
    """A copy of the base module with parameters of the adapter's: y = module(x; parameters)."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor | LowRankWeight]) -> None:
        """`module`'s other parameters and its children are shared, not copied."""
        self._source = module
        self._parameters = {name: _as_in(module, name, parameter) for name, parameter in parameters.items()}
        self._module = _twin_of(module, self._parameters)

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._parameters.values())

    def to(self, device: torch.device) -> Twin:
        return Twin(self._source, {name: parameter.to(device) for name, parameter in self._parameters.items()})

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert scale == 1.0, "only deltas can be scaled"
        for old, new in zip(_tensors(y), _tensors(self._module(*inputs)), strict=True):
            old.copy_(new.view(old.shape))  # `old` may have copies of all tokens as a dimension of their own


class LowRankWeight:
    """A weight W + scale * L^T R, where L is LoRA's B, or its A if W lies [in, out]. Products with it, on the right,
    compute both terms, and any other use forms the one matrix.

    Indexing takes one expert's weight out of a stack, which is never formed as a whole. To torch it is an argument that
    overrides functions (https://docs.pytorch.org/docs/stable/notes/extending.html, "duck typing").
    """

    def __init__(self, base: Tensor | PackedStack | PackedMatrix, left: Tensor, right: Tensor, scale: float) -> None:
        """base [..., n, m], left [..., rank, n], right [..., rank, m]."""
        self.base: Any = base
        self.left, self.right, self.scale = left, right, scale
        self.shape, self.dtype, self.device = base.shape, base.dtype, base.device

    @property
    def nbytes(self) -> int:
        return self.left.nbytes + self.right.nbytes

    def to(self, *place: Any, **named: Any) -> Any:
        """On a device alone: the same with A and B there. Else the formed weight, cast."""
        if named or not isinstance(place[0], torch.device):
            return self._formed().to(*place, **named)
        return LowRankWeight(self.base, self.left.to(*place), self.right.to(*place), self.scale)

    def __getitem__(self, expert: int | Tensor) -> Any:
        if self.base.dim() == 2:  # a row of it
            return self._formed()[expert]
        return LowRankWeight(self.base[expert], self.left[expert], self.right[expert], self.scale)

    def __getattr__(self, name: str) -> Any:
        """What a model asks of its weight: casts, products, views."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._formed(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...], keywords: Any = None
    ) -> Any:
        weight: Any
        named = keywords or {}
        x, weight, *_ = *arguments, None, None
        if (
            function not in (F.linear, *PRODUCTS)
            or isinstance(x, LowRankWeight)
            or not isinstance(weight, LowRankWeight)
        ):
            return function(*map(_as_tensor, arguments), **{name: _as_tensor(value) for name, value in named.items()})
        y = function(x, weight.base, *arguments[2:], **named)
        wide = torch.promote_types(x.dtype, weight.left.dtype)
        first, second = (weight.right, weight.left) if function is F.linear else (weight.left, weight.right)
        delta = (x.to(wide) @ first.mT.to(wide)) @ second.to(wide)
        return y.add_(delta, alpha=weight.scale)

    def _formed(self) -> Tensor:
        """The weight, summed in float32 and rounded to its type, as PEFT forms it."""
        if self.base.dim() != 2:
            raise TypeError("the low-rank weights of a stack of experts are not formed all at once")
        delta = self.left.mT.float() @ self.right.float()
        return torch.add(self.base.float(), delta, alpha=self.scale).to(self.base.dtype)


def _as_tensor(value: Any) -> Any:
    return value._formed() if isinstance(value, LowRankWeight) else value  # noqa: SLF001


def _as_in(module: nn.Module, name: str, parameter: Tensor | LowRankWeight) -> Tensor | LowRankWeight:
    """The parameter in the type of the module's own."""
    return parameter.to(getattr(module, name).dtype) if isinstance(parameter, Tensor) else parameter


def _twin_of(module: nn.Module, parameters: Mapping[str, Tensor | LowRankWeight]) -> nn.Module:
    twin = copy.copy(module)
    children = {name: child for name, child in module._modules.items() if name != ADAPTERS}  # noqa: SLF001
    parts = {"_parameters": dict(module._parameters), "_modules": children}  # noqa: SLF001
    twin.__dict__.update(parts, _forward_hooks={}, _forward_pre_hooks={})
    twin.__dict__.pop("forward", None)  # a fused one reads the parameters of `module`
    for name, parameter in parameters.items():
        twin._parameters.pop(name, None)  # noqa: SLF001
        twin.__dict__.pop(name, None)  # one in panels
        if isinstance(parameter, Tensor):
            twin._parameters[name] = nn.Parameter(parameter, requires_grad=False)  # noqa: SLF001
        else:
            twin.__dict__[name] = parameter
    if any(isinstance(value, LowRankWeight | PackedStack) for value in vars(twin).values()) and hasattr(twin, "config"):
        config: Any = copy.copy(module.config)
        config._experts_implementation = "eager"  # noqa: SLF001 - the one that multiplies expert by expert
        twin.config = config
    return twin


def _tensors(value: Tensor | tuple[Tensor, ...]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        yield from value


@dataclass(frozen=True, slots=True)
class ReplacedWeights:
    """A linear layer that an adapter trained in full (modules_to_save), in host memory; `to` makes the `ReplacedLinear`
    of it.

    An output head may have more or fewer rows than the base's (a resized vocabulary), and then its own bias.
    """

    base: FrozenLinear
    parameters: Mapping[str, Tensor]  # weight as the base's checkpoint holds it ([out, in]; Conv1D [in, out]), bias

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters.values())

    def to(self, device: torch.device) -> ReplacedLinear:
        """The layer laid out for the device's products, which takes a while: on a CPU the loader does it."""
        weight = self.parameters["weight"].t() if self.base.is_transposed else self.parameters["weight"]
        bias = self.parameters.get("bias", self.base.bias)
        source = nn.Linear(self.base.in_features, len(weight), bias=False, device="meta")
        source.weight = nn.Parameter(weight.to(device, self.base.dtype).contiguous(), requires_grad=False)
        if bias is not None:
            source.bias = nn.Parameter(bias.to(device, self.base.dtype), requires_grad=False)
        return ReplacedLinear(FrozenLinear(source), self.num_bytes, device)

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        raise AssertionError("it is not on a device yet")


@dataclass(frozen=True, slots=True)
class ReplacedLinear:
    """y = x W^T + bias with the adapter's own W, and its own bias or the base's; a `Change`."""

    linear: FrozenLinear
    num_bytes: int
    device: torch.device

    def to(self, device: torch.device) -> ReplacedLinear:
        assert device == self.device, "its layout is this device's"
        return self

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        assert scale == 1.0, "only deltas can be scaled"
        y[..., : self.linear.out_features].copy_(self.linear.sums(inputs[0]))


@dataclass(frozen=True, slots=True)
class InputGain(TensorFields):
    """y = W (gain * x) + bias, from y = W x + bias: (IA)^3 of a feed-forward layer; a `Change`."""

    base: FrozenLinear
    gain: Tensor  # [in_features]

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        assert scale == 1.0, "only deltas can be scaled"
        y.add_(self.base.product((inputs[0] * (self.gain - 1)).to(self.base.dtype)))
