"""The evidence that a replacement changes nothing: one traced pass of a few tokens, and the names that a layer's code
uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step.step_context import DecodeRows, PrefillRow, StepInputs

NUM_TOKENS = 7
_TOLERANCE = 1e-5  # of the largest number; what float32 rounds off


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any


def probe_step(cache: KVCache, vocab_size: int, max_model_len: int) -> StepInputs:
    """A step of one row of the base model in the cache's spare blocks, at positions near and far."""
    (blocks,) = cache.spare_blocks(1, NUM_TOKENS)
    positions = torch.arange(NUM_TOKENS, device=cache.device)
    table = torch.tensor(blocks, device=cache.device)
    size = cache.block_size
    nothing = torch.zeros(0, dtype=torch.int64, device=cache.device)
    return StepInputs(
        token_ids=(positions * 7919 % vocab_size)[None],
        position_ids=(positions * (max_model_len - 1) // (NUM_TOKENS - 1))[None],
        cache_positions=table[positions // size] * size + positions % size,
        decode=DecodeRows(0, nothing.view(0, 0), nothing),
        prefill=(PrefillRow(0, NUM_TOKENS, 0, table),),
        logit_positions=positions[-1:],
        lora=(),
        lora_logits=(),
    )


@contextmanager
def calls_of(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, list[Call]]]:
    """Records every call of these modules inside the block, by module."""
    found: dict[nn.Module, list[Call]] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        found.setdefault(module, []).append(Call(_kept(arguments), _kept(keywords), _kept(output)))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def agrees(call: Call, forward: Callable[..., Any]) -> bool:
    """True if `forward` returns what the module returned; False if it cannot run on such a layer at all."""
    try:
        found = forward(*_kept(call.arguments), **_kept(dict(call.keywords)))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    found, expected = (value if isinstance(value, tuple) else (value,) for value in (found, call.output))
    return len(found) == len(expected) and is_close(found[0], expected[0])


def is_close(found: Tensor, expected: Tensor) -> bool:
    """True if two tensors differ by no more than float32's rounding."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max().clamp(min=1e-6))


def _kept(value: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(_kept(item) for item in value)
    if isinstance(value, dict):
        return {name: _kept(item) for name, item in value.items()}
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
