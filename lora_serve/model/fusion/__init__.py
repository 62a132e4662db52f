"""Layers whose Python code is replaced by fewer and larger kernels, where that is proved to change no result.

A norm, a gated feed-forward layer or an attention layer that looks like one of the kinds in `kinds/` runs beside its
replacement on the same inputs, and is replaced only if the results agree; all other layers stay transformers' own code.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model import backend_names
from lora_serve.model.fusion import kinds
from lora_serve.model.fusion.parts import (
    FusionParts,
    ModuleCall,
    cached_of,
    calls_of,
    clear_probe,
    in_float32,
    is_close,
    is_close_rounded,
    probe_step,
    repeated,
)
from lora_serve.model.step_context import StepInputs

_KINDS: dict[str, Any] = {name: importlib.import_module(f"{kinds.__name__}.{name}") for name in backend_names(kinds)}


def fuse(parts: FusionParts, run: Callable[[StepInputs], Any], vocab_size: int, max_model_len: int) -> Counter[str]:
    """Replaces layers and returns how many of each kind. `run`: a forward pass of the model as it is."""
    done: Counter[str] = Counter()
    for stage in (1, 2):
        step = probe_step(parts.cache, vocab_size, max_model_len)
        done += _fuse_stage(parts, run, step, {name: kind for name, kind in _KINDS.items() if stage == kind.STAGE})
    return done


def _fuse_stage(
    parts: FusionParts, run: Callable[[StepInputs], Any], step: StepInputs, stage: dict[str, Any]
) -> Counter[str]:
    members = {
        module: name for module in parts.module.modules() for name, kind in stage.items() if kind.could_be(module)
    }
    with calls_of(list(members)) as calls:
        run(step)
    written = cached_of(parts.cache, step)
    done: Counter[str] = Counter()
    with parts.context.running(step):
        for module, name in members.items():
            found = _proven(parts, module, stage[name], calls.get(module, []), step, written)
            if found is not None:
                module.forward = found
                if hasattr(found, "settle"):
                    found.settle(module)
                done[name] += 1
    return done


def _proven(
    parts: FusionParts, module: nn.Module, kind: Any, calls: list[ModuleCall], step: StepInputs, written: Tensor
) -> Callable[..., Any] | None:
    """The first replacement that agrees with all calls; None if there is none. `written`: K and V after the pass."""
    left: list[Callable[..., Any]] = kind.candidates(module, parts) if calls else []
    for call in calls:
        is_known = len(calls) == 1 and not (_is_wide(kind) and written.dtype != torch.float32)
        truth = _recorded(module, call, written) if is_known else _repeated(parts, module, kind, call, step)
        left = [one for one in left if truth is not None and _agrees(parts, one, kind, call, step, truth)]
    return left[0] if left else None


@dataclass(frozen=True, slots=True)
class _Truth:
    output: Tensor
    cached: Tensor


def _is_wide(kind: Any) -> bool:
    """True if the truth is computed in float32 from the same numbers, so that nothing of a module's own rounding hides
    how far the replacement is from it. A module that is made of fused parts alone rounds where its replacement does.
    """
    return bool(kind.STAGE == 1)


def _recorded(module: nn.Module, call: ModuleCall, written: Tensor) -> _Truth:
    """The result of the module's own code in the pass, and K and V of its own layer as the pass left them."""
    output = call.output[0] if isinstance(call.output, tuple) else call.output
    cached = torch.zeros_like(written)
    for layer in {getattr(one, "layer_idx", None) for one in module.modules()}:
        if isinstance(layer, int):
            cached[layer] = written[layer]
    return _Truth(output, cached)


def _repeated(parts: FusionParts, module: nn.Module, kind: Any, call: ModuleCall, step: StepInputs) -> _Truth | None:
    """The result of the module's own code on the arguments of one call."""
    is_wide = _is_wide(kind)
    clear_probe(parts.cache, step)  # so that none is found that this run has not written
    with _wide(module, kind, parts.kernels.dtype) if is_wide else nullcontext():
        output = repeated(call, module.forward, is_wide=is_wide)
    return None if output is None else _Truth(output, cached_of(parts.cache, step))


@contextmanager
def _wide(module: nn.Module, kind: Any, dtype: torch.dtype) -> Iterator[None]:
    """A module in float32 inside the block, which rounds to `dtype` what lies between its products, where the kind says
    so: linear layers do by themselves.
    """
    with in_float32(module), kind.rounding(module, dtype) if hasattr(kind, "rounding") else nullcontext():
        yield


def _agrees(
    parts: FusionParts, forward: Callable[..., Any], kind: Any, call: ModuleCall, step: StepInputs, truth: _Truth
) -> bool:
    """True if `forward` gives the truth from the call's arguments and, as it rounds less there, from wide ones."""
    own_type = truth.cached.dtype
    for is_wide in (False, True) if kind.STAGE == 1 and own_type != torch.float32 else (False,):
        clear_probe(parts.cache, step)  # so that none is found that this run has not written
        found = repeated(call, forward, is_wide=is_wide)
        pairs = (found, truth.output), (cached_of(parts.cache, step), truth.cached)
        if not all(one is not None and _is_close(kind, one, other) for one, other in pairs):
            return False
    return True


def _is_close(kind: Any, found: Tensor, expected: Tensor) -> bool:
    return (is_close if kind.STAGE == 2 or found.dtype == torch.float32 else is_close_rounded)(found, expected)
