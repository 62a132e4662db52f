"""Mixtures of experts by products that are grouped by expert on the device, so that captured graphs may hold them.

transformers' models ask one registry how their experts are computed. Its loop over the experts that some token chose,
and its grouped product where torch has none for a type or a card, make the host wait; here nothing does, no shape
depends on what was chosen, and a token's numbers do not depend on the tokens beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from lora_serve.model.expert_products import OPERATORS

_log = logging.getLogger(__name__)
NAME = "lora_serve_grouped"
ADAPTERS = "adapters"  # a child of a module of experts: by weight, what adds the rows' deltas to its products
_ALIGNED = 16  # bytes, of which each row of torch's grouped products is a multiple
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def group_experts(module: PreTrainedModel) -> int:
    """Lets the model compute its experts here, and returns how many modules of them it has; 0: it stays as it is."""
    found = list(expert_modules(module))
    if found and all(weight.dtype in _TYPES for part in found for weight in part.parameters(recurse=False)):
        module.set_experts_implementation(NAME)
    grouped = [part for part in found if part.config._experts_implementation == NAME]  # noqa: SLF001 - as transformers
    if found:
        _log.info("experts: %d of %d modules by products that are grouped on the device", len(grouped), len(found))
    return len(grouped)


def choose_products(module: PreTrainedModel) -> None:
    """Has experts computed one by one if they are of sizes that torch's grouped product refuses."""
    weights = [weight for part in expert_modules(module) for weight in part.parameters(recurse=False)]
    if any(size * weight.element_size() % _ALIGNED for weight in weights for size in weight.shape[1:]):
        module.set_experts_implementation("eager")


def expert_modules(module: nn.Module) -> Iterator[Any]:
    """The modules that ask transformers' registry."""
    return filter(is_experts, module.modules())


def is_experts(module: nn.Module) -> bool:
    """True if the module asks transformers' registry."""
    return all(hasattr(module, name) for name in ("config", "has_gate", "has_bias", "is_transposed", "down_proj"))


def compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registry's function, as `grouped_mm_experts_forward` of transformers: hidden_states [tokens, hidden],
    top_k_index and top_k_weights [tokens, top_k] -> [tokens, hidden].
    """
    per_token, experts = top_k_index.shape[1], top_k_index.reshape(-1)
    order, tiles = OPERATORS.sort_pairs(experts, module.num_experts)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _product(module, name, hidden_states, per_token, experts, order, tiles)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # noqa: SLF001 - as transformers
    out = _product(module, "down_proj", inner, 1, experts, order, tiles)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    weighted = (out * top_k_weights.reshape(-1, 1)).view(-1, per_token, out.shape[-1])
    return weighted.sum(dim=1).to(hidden_states.dtype)


ExpertsInterface.register(NAME, compute_experts)


def _product(module: Any, name: str, x: Tensor, per_row: int, experts: Tensor, order: Tensor, tiles: Tensor) -> Tensor:
    """x [pairs // per_row, in] -> [pairs, out] by each pair's expert."""
    weight = getattr(module, name)
    y: Tensor = OPERATORS.multiply_pairs(x, weight.mT if module.is_transposed else weight, order, tiles, per_row)
    adapters = getattr(module, ADAPTERS, {})
    if name in adapters:
        adapters[name].adapt(y, x, experts)
    return y + getattr(module, f"{name}_bias")[experts] if module.has_bias else y
