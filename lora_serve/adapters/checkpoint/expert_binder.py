"""Binds the LoRA of single experts, and of their router, to a base that keeps all experts in one parameter. No torch.

The config's targets, ranks and scales are matched with the old layers' paths: it was written for those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lora_serve.adapters.checkpoint.bound import BoundDelta, BoundExperts, BoundLinear, TensorPlace, place_of
from lora_serve.adapters.checkpoint.module_patterns import ranks_and_scales
from lora_serve.adapters.checkpoint.peft_config import ALL_LINEAR, PeftConfig, targeted, targeted_parameters
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.model_spec import LinearShape, ModelSpec, Shape

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
        num_experts, hidden, inner = table[DOWN] if len(table.get(DOWN, ())) == 3 else (0, 0, 0)
        if module.endswith(".experts") and table.get(GATE_UP) == (num_experts, 2 * inner, hidden):
            yield module  # others' lie the other way round, and had no layer for each expert


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


_FACTORS = ("lora_A", "lora_B")
_ROLES = (*_FACTORS, "lora_bias", "magnitude")
_MAX_NAMED = 16  # of the layers that lack something; a model may have tens of thousands


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """The deltas that were bound, the other tensors, and the reasons for a refusal, if any."""

    rest: Mapping[str, TensorInfo]
    deltas: Mapping[str, Mapping[str, BoundDelta | BoundExperts]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def bind_experts(config: PeftConfig, tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> FoundExperts:
    """The LoRA of experts among the tensors. Raises InvalidAdapterError for a pattern that cannot be matched."""
    found = [_ExpertBinder(config, tensors, old_layers(spec, spelling)) for spelling in SPELLINGS]
    binder = max(found, key=lambda one: len(one.left))
    return binder.bind() if binder.left else FoundExperts(tensors)


class _ExpertBinder:
    """Takes tensors out of `left` as they find their places; whatever stays there is refused."""

    def __init__(self, config: PeftConfig, tensors: Mapping[str, TensorInfo], layers: dict[str, OldLayer]) -> None:
        self._config = config
        self._tensors = tensors
        routers = {f"{layer.module}.weight" for layer in layers.values() if layer.expert is None}
        parameters = targeted_parameters(config, routers) if routers else frozenset()
        self._layers = {
            path: layer for path, layer in layers.items() if f"{layer.module}.{layer.parameter}" not in parameters
        }
        self._reasons: list[str] = []
        self._missing: list[str] = []
        self.left: dict[TensorPlace, str] = {}
        for name in tensors if layers else ():
            self._place(name)
        self._mine = frozenset(self.left.values())

    def bind(self) -> FoundExperts:
        targets = sorted(self._targets())
        linears = {
            path: self._linear(path, *ranks) for path, ranks in ranks_and_scales(self._config.ranks, targets).items()
        }
        self._refuse_missing()
        self._refuse_other_methods(targets)
        self._refuse_left(linears)
        deltas = self._by_parameter(linears)
        return FoundExperts(self._rest(deltas), deltas, self._reasons)

    def _place(self, name: str) -> None:
        place = place_of(name)
        if place is None or place.module not in self._layers or place.role not in _ROLES:
            return
        if place in self.left:
            self._reasons.append(f"tensor {name[:200]!r} is there twice under two names")
        self.left.setdefault(place, name)

    def _targets(self) -> frozenset[str]:
        targets = targeted(self._config, tuple(self._layers))
        routers = {path for path, layer in self._layers.items() if layer.expert is None}
        # Some models' routers were bare parameters before, too, which "all-linear" does not mean.
        means_all = isinstance(self._config.target_modules, str) and self._config.target_modules.lower() == ALL_LINEAR
        if means_all and not any(place.module in routers for place in self.left):
            return targets - routers
        return targets

    def _linear(self, path: str, rank: int, scale: float) -> BoundLinear:
        shape = self._layers[path].shape
        shapes = ((rank, shape.in_features), (shape.out_features, rank))
        a, b = (self._take(path, role, wanted) for role, wanted in zip(_FACTORS, shapes, strict=True))
        return BoundLinear(a, b, rank, scale)

    def _take(self, path: str, role: str, shape: Shape) -> str:
        name = self.left.pop(TensorPlace(path, role), "")
        if not name:
            self._missing.append(f"{role} of {path}")
        elif self._tensors[name].shape != shape:
            self._reasons.append(
                f"tensor {name!r} has shape {list(self._tensors[name].shape)}, but its rank and the base model's "
                f"experts ask for {list(shape)}"
            )
        return name

    def _by_parameter(self, linears: Mapping[str, BoundLinear]) -> dict[str, dict[str, BoundDelta | BoundExperts]]:
        found: dict[str, dict[str, list[str]]] = {}
        for path in linears:
            layer = self._layers[path]
            found.setdefault(layer.module, {}).setdefault(layer.parameter, []).append(path)
        return {
            module: {name: self._delta(name, {path: linears[path] for path in paths}) for name, paths in table.items()}
            for module, table in found.items()
        }

    def _delta(self, parameter: str, linears: Mapping[str, BoundLinear]) -> BoundDelta | BoundExperts:
        first = self._layers[next(iter(linears))]
        if first.expert is None:
            (linear,) = linears.values()
            return BoundDelta(linear.a_name or "", linear.b_name or "", linear.rank, linear.scale, num_experts=1)
        parts: list[dict[int, BoundLinear]] = [{} for _ in range(2 if parameter == GATE_UP else 1)]
        for path, linear in linears.items():
            layer = self._layers[path]
            parts[layer.part][layer.expert or 0] = linear
        return BoundExperts(tuple(parts), first.num_experts, first.shape)

    def _refuse_missing(self) -> None:
        if self._missing:
            more = f" and {len(self._missing) - _MAX_NAMED} more" if len(self._missing) > _MAX_NAMED else ""
            self._reasons.append(f"missing: {', '.join(self._missing[:_MAX_NAMED])}{more}")

    def _refuse_other_methods(self, targets: Iterable[str]) -> None:
        for setting in ("use_dora", "lora_bias"):
            if getattr(self._config, setting) and (path := next(iter(targets), None)):
                self._reasons.append(f"{setting} is not supported on single experts and their routers, such as {path}")

    def _refuse_left(self, linears: Mapping[str, BoundLinear]) -> None:
        for module in sorted({place.module for place in self.left} - linears.keys()):
            self._reasons.append(f"the file has weights for {module}, but the config does not target it")
        for place, name in self.left.items():
            if place.module in linears:
                self._reasons.append(f"tensor {name[:200]!r} is none of the plain LoRA that single experts can have")

    def _rest(self, deltas: Mapping[str, object]) -> dict[str, TensorInfo]:
        rest = {}
        for name, info in self._tensors.items():
            place = place_of(name)
            if name in self._mine:
                continue
            if place is not None and place.module in deltas and place.role in _ROLES:
                self._reasons.append(f"tensor {name[:200]!r} changes all experts, beside others for single experts")
            else:
                rest[name] = info
        return rest
