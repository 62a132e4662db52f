"""The layers of a mixture of experts before transformers 5 stacked their weights. No torch.

Every expert was three linear layers and the router a fourth, each a target of LoRA by itself. A base that keeps one
parameter for all experts still takes such adapters: this file says where each old layer's weight lies in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_serve.core.model_spec import LinearShape, ModelSpec

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # [experts, 2 * inner, hidden], gate before up; [experts, hidden, inner]


@dataclass(frozen=True, slots=True)
class Spelling:
    """The names of the old layers."""

    block: str  # last name of what holds the router and the experts; empty: as in the base
    gate: str
    up: str
    down: str


SPELLINGS = (
    Spelling("", "gate_proj", "up_proj", "down_proj"),  # qwen2_moe, qwen3_moe, olmoe, deepseek
    Spelling("block_sparse_moe", "w1", "w3", "w2"),  # mixtral, phimoe
)


@dataclass(frozen=True, slots=True)
class OldLayer:
    """A linear layer that the base no longer has, and the part of a parameter that its weight is now."""

    module: str
    parameter: str
    shape: LinearShape
    part: int = 0  # of the parts that are stacked along the outputs
    expert: int | None = None  # None: the router
    num_experts: int = 1


def old_layers(spec: ModelSpec, spelling: Spelling) -> dict[str, OldLayer]:
    """The old layers by their old paths, of every stack of experts in the base."""
    layers: dict[str, OldLayer] = {}
    for module in _stacks(spec):
        block = module.removesuffix(".experts")
        old = f"{block.rpartition('.')[0]}.{spelling.block}" if spelling.block else block
        layers |= _expert_layers(spec, module, f"{old}.experts", spelling)
        layers |= _router(spec, f"{block}.gate", f"{old}.gate")
    return layers


def num_old_layers(spec: ModelSpec) -> int:
    """The most layers that `old_layers` returns, without making them."""
    return sum(3 * spec.modules[module][DOWN][0] + 1 for module in _stacks(spec))


def _stacks(spec: ModelSpec) -> Iterator[str]:
    for module, table in spec.modules.items():
        if module.endswith(".experts") and all(len(table.get(name, ())) == 3 for name in (GATE_UP, DOWN)):
            yield module


def _expert_layers(spec: ModelSpec, module: str, old: str, spelling: Spelling) -> Iterator[tuple[str, OldLayer]]:
    num_experts, hidden, inner = spec.modules[module][DOWN]
    wide, narrow = LinearShape(hidden, inner), LinearShape(inner, hidden)
    for expert in range(num_experts):
        yield f"{old}.{expert}.{spelling.gate}", OldLayer(module, GATE_UP, wide, 0, expert, num_experts)
        yield f"{old}.{expert}.{spelling.up}", OldLayer(module, GATE_UP, wide, 1, expert, num_experts)
        yield f"{old}.{expert}.{spelling.down}", OldLayer(module, DOWN, narrow, 0, expert, num_experts)


def _router(spec: ModelSpec, module: str, old: str) -> dict[str, OldLayer]:
    """The router's old layer; empty where the base's router is a linear layer still, or something else."""
    shape = spec.modules.get(module, {}).get("weight", ())
    if len(shape) != 2 or module in spec.linears:
        return {}
    return {old: OldLayer(module, "weight", LinearShape(shape[1], shape[0]))}
