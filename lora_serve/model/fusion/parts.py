"""The parts that a fused layer is built from, and the traced pass of a few tokens that proves it equal."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.attention import Attention
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native.layer_kernels import LayerKernels
from lora_serve.model.step_context import AttentionSettings, DecodeRows, PrefillRow, StepContext, StepInputs


def join_packed(parts: Sequence[LoraLinear]) -> LinearGroup | None:
    """The joined layers, or one alone; None if their weights are not in panels, or cannot lie in one piece of them."""
    if any(part.base.packed is None for part in parts):
        return None
    return LinearGroup.of(parts) if len(parts) > 1 else parts[0].group


@dataclass(frozen=True, slots=True)
class FusionParts:
    """The model and the objects that its layers share."""

    module: nn.Module
    cache: KVCache
    slots: LoraSlots
    attention: Attention
    context: StepContext[StepInputs]
    settings: Mapping[int, AttentionSettings]  # by layer, known once the model has run
    kernels: LayerKernels
    paths: Mapping[nn.Module, str]  # the place of every module in the model


NUM_TOKENS = 7
_TOLERANCE = 1e-5  # of the largest number; what float32 rounds off
_ROUNDED_TOLERANCE = 2e-3  # of the root mean square: what one rounding to bfloat16 in a place or two can do
_ROUNDED_LARGEST = 2e-2  # of the largest number


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any


def probe_step(cache: KVCache, vocab_size: int, max_model_len: int, num_tokens: int = NUM_TOKENS) -> StepInputs:
    """A step of one row of the base model in the cache's spare blocks, at positions near and far."""
    positions = torch.arange(num_tokens, device=cache.device)
    nothing = torch.zeros(0, dtype=torch.int64, device=cache.device)

    def step_in(kind: int) -> StepInputs:
        table, size = torch.tensor(cache.spare_blocks(1, num_tokens, kind)[0], device=cache.device), cache.block_size
        return StepInputs(
            token_ids=(positions * 7919 % vocab_size)[None],
            position_ids=(positions * (max_model_len - 1) // max(num_tokens - 1, 1))[None],
            cache_positions=table[positions // size] * size + positions % size,
            decode=DecodeRows(0, nothing.view(0, 0), nothing),
            prefill=(PrefillRow(0, num_tokens, 0, table),),
            logit_positions=positions[-1:],
            lora=(),
            lora_logits=(),
        )

    step, *windowed = map(step_in, range(cache.shape.num_kinds))
    return replace(step, windowed=windowed[0]) if windowed else step


def clear_probe(cache: KVCache, step: StepInputs) -> None:
    """Zeroes the blocks of a probe's step."""
    cache.zero(*([block for row in own.prefill for block in row.blocks.tolist()] for own in _by_kind(step)))


def cached_of(cache: KVCache, step: StepInputs) -> Tensor:
    """K and V that a probe's step has in the cache, see `KVCache.read`."""
    return cache.read(*(own.cache_positions for own in _by_kind(step)))


def _by_kind(step: StepInputs) -> tuple[StepInputs, ...]:
    return (step,) if step.windowed is None else (step, step.windowed)


@contextmanager
def calls_of(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, list[ModuleCall]]]:
    """Records every call of these modules inside the block, by module."""
    found: dict[nn.Module, list[ModuleCall]] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        found.setdefault(module, []).append(ModuleCall(_copied(arguments), _copied(keywords), _copied(output)))

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        yield found


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Gives a module float32 copies of its parameters inside the block; the linear layers' own are in panels."""
    own = [(p, p.data) for p in module.parameters() if p.is_floating_point() and p.dtype != torch.float32]
    for parameter, data in own:
        parameter.data = data.float()
    try:
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


def repeated(call: ModuleCall, forward: Callable[..., Any], *, is_wide: bool = False) -> Tensor | None:
    """The first output of `forward` for the arguments of a call, widened to float32 if `is_wide`; None if it cannot run
    on such a layer at all, or returns another number of things than the module did.
    """
    arguments = _copied(call.arguments, is_wide), _copied(dict(call.keywords), is_wide)
    try:
        found = forward(*arguments[0], **arguments[1])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    found, expected = (value if isinstance(value, tuple) else (value,) for value in (found, call.output))
    is_like = len(found) == len(expected) and found[0].shape == expected[0].shape
    return found[0] if is_like and (is_wide or found[0].dtype == expected[0].dtype) else None


def is_close(found: Tensor, expected: Tensor) -> bool:
    """True if two tensors differ by no more than float32's rounding."""
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max().clamp(min=1e-6))


def is_close_rounded(found: Tensor, expected: Tensor) -> bool:
    """True if two tensors are one result of float32, rounded now and then.

    Both round inputs of products and the result at the same places: only numbers that stand by chance at the middle
    between two of bfloat16 fall to different sides.
    """
    found, expected = found.float(), expected.to(found.dtype).float()
    difference, largest = (found - expected).abs(), expected.abs().max().clamp(min=1e-6)
    is_near = difference.norm() <= _ROUNDED_TOLERANCE * expected.norm().clamp(min=1e-6)
    return bool(is_near and difference.max() <= _ROUNDED_LARGEST * largest)


def _copied(value: Any, is_wide: bool = False) -> Any:
    """A copy that later steps do not change; if `is_wide`, with numbers in float32."""
    if isinstance(value, Tensor):
        return value.float().clone() if is_wide and value.is_floating_point() else value.clone()
    if isinstance(value, tuple):
        return tuple(_copied(item, is_wide) for item in value)
    if isinstance(value, dict | UserDict):
        return type(value)({name: _copied(item, is_wide) for name, item in value.items()})
    return value


def names_only(module: nn.Module, known: frozenset[str]) -> bool:
    """True if the module's forward, and the methods of its own that it calls, use no other attributes and globals.

    A probe of a few tokens cannot see what a layer does only to large numbers or at far positions (clamps, scales that
    set in after thousands of tokens); but code that does such things names them.
    """
    if "forward" in vars(module):
        return False
    waiting, seen = ["forward"], set[str]()
    while waiting:
        code = _code(getattr(type(module), waiting.pop()))
        if code is None:
            return False
        new = set(code.co_names) - seen
        seen |= new
        waiting += [name for name in new if callable(_method(module, name))]
    return seen <= known


def _method(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """A method that the module's class adds to those of every module."""
    found = getattr(type(module), name, None)
    return found if found is not getattr(nn.Module, name, None) else None


def _code(function: Any) -> Any:
    return getattr(inspect.unwrap(function), "__code__", None)
