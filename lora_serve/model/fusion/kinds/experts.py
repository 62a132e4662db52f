"""Experts whose weights are stacks: all of a step's pairs of tokens and experts in one call of the native kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.experts import is_experts
from lora_serve.model.fusion.parts import FusionParts, names_only
from lora_serve.model.native.experts import Layout, NativeExperts, PackedStack
from lora_serve.model.native.layer_kernels import ACTIVATIONS, CLAMPED, Gate, LayerKernels

STAGE = 1
_STACKS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
_NAMES = frozenset(
    {*_STACKS, *_BIASES, "F", "_apply_gate", "act_fn", "alpha", "chunk", "clamp", "device", "dtype", "float", "float32"}
    | {"functional", "greater", "index_add_", "limit", "linear", "nn", "no_grad", "nonzero", "num_experts", "one_hot"}
    | {"permute", "sigmoid", "silu", "sum", "swiglu_alpha", "swiglu_limit", "to", "torch", "where", "zeros_like"}
)


class FusedExperts:
    """y = sum over a token's experts of weight * down(act(gate(x)) * up(x)).

    The module's weights lie in panels from then on, in the place of its parameters.
    """

    def __init__(self, native: NativeExperts, stacks: dict[str, PackedStack]) -> None:
        self._native = native
        self._stacks = stacks

    def __call__(self, hidden_states: Tensor, *chosen: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], the experts and the weights of each token [tokens, top_k] -> its shape."""
        experts, weights = chosen
        return self._native(hidden_states, experts, weights)

    def settle(self, module: nn.Module) -> None:
        """Frees the parameters that are in panels now."""
        for name, stack in self._stacks.items():
            delattr(module, name)
            module.__dict__[name] = stack


def could_be(module: nn.Module) -> bool:
    """True for experts with gates and no norm of their own that name nothing that such experts have no use for."""
    if not is_experts(module):
        return False
    own: Any = module
    names = {*_STACKS, *(_BIASES if own.has_bias else ())}
    is_like = own.has_gate and not own.has_post_expert_norm and {name for name, _ in own.named_parameters()} == names
    return is_like and names_only(module, _NAMES)


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedExperts]:
    """One, if the gate is known and the weights are of the kernels' type."""
    own: Any = module
    gate = next((gate for gate in _gates(own) if _computes(own, gate, parts.kernels)), None)
    if gate is None or any(parameter.dtype != parts.kernels.dtype for parameter in own.parameters()):
        return []
    stacks = {name: PackedStack(getattr(own, name).detach(), _layout(own, name)) for name in _STACKS}
    biases = None
    if own.has_bias:
        up, down = (getattr(own, name).detach().float() for name in _BIASES)
        order = stacks["gate_up_proj"].layout.order
        biases = (up if order is None else up[:, order]).contiguous(), down.contiguous()
    return [FusedExperts(NativeExperts(stacks["gate_up_proj"], stacks["down_proj"], gate, biases), stacks)]


@contextmanager
def rounding(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Lets a module in float32 round the inputs of its second product to `dtype` inside the block."""
    own: Any = module
    gate = own._apply_gate  # noqa: SLF001 - as transformers
    own._apply_gate = lambda both: gate(both).to(dtype).to(both.dtype)  # noqa: SLF001
    try:
        yield
    finally:
        del own._apply_gate  # noqa: SLF001


def _layout(module: Any, name: str) -> Layout:
    order = None
    if name == "gate_up_proj" and not module.is_concatenated:  # gate and up take turns
        size = getattr(module, name).shape[2 if module.is_transposed else 1]
        order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    return Layout(module.is_transposed, order)


def _gates(module: Any) -> Iterator[Gate]:
    yield from (Gate(name) for name in ACTIVATIONS)
    alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", 1.0))
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    if isinstance(alpha, float | int) and isinstance(limit, float | int):
        yield from (Gate(CLAMPED, alpha, limit, offset) for offset in (0.0, 1.0))


def _computes(module: Any, gate: Gate, kernels: LayerKernels) -> bool:
    """True if that is the module's gate, for small numbers and large: a probe's numbers may not tell."""
    edges = [-1e4, -100.0, -9.0, -1.0, 0.5, 1.0, 8.0, 100.0, 1e4]
    grid = torch.tensor([*torch.linspace(-20.0, 20.0, 256).tolist(), *edges])
    pairs = torch.tensor([*itertools.product(grid.tolist(), edges)])
    found = kernels.gated(pairs.t().reshape(1, -1), gate)[0]
    expected = module._apply_gate((pairs.t() if module.is_concatenated else pairs).reshape(1, -1))[0]  # noqa: SLF001
    return torch.allclose(found.float(), expected, rtol=1e-5 + torch.finfo(found.dtype).eps, atol=1e-6)
