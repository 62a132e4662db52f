"""Tries the replacements of every layer and keeps those that prove equal."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.backends import backend_names
from lora_serve.model.fusion import kinds
from lora_serve.model.fusion.parts import FusionParts
from lora_serve.model.fusion.trace import Call, agrees, calls_of, is_close, probe_step
from lora_serve.model.step.step_context import StepInputs

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
    cached = _cached(parts, step)
    done: Counter[str] = Counter()
    with parts.context.running(step):
        for module, name in members.items():
            found = _proven(parts, module, stage[name], calls.get(module, []), step, cached)
            if found is not None:
                module.forward = found
                done[name] += 1
    return done


def _proven(
    parts: FusionParts, module: nn.Module, kind: Any, calls: list[Call], step: StepInputs, cached: tuple[Tensor, Tensor]
) -> Callable[..., Any] | None:
    """The first replacement that agrees with all calls; None if there is none."""
    candidates: list[Callable[..., Any]] = kind.candidates(module, parts)
    for candidate in candidates:
        if not calls or not all(agrees(call, candidate) for call in calls):
            continue
        if kind.WRITES_CACHE and not all(map(is_close, _cached(parts, step), cached)):
            continue
        return candidate
    return None


def _cached(parts: FusionParts, step: StepInputs) -> tuple[Tensor, Tensor]:
    """K and V of the step's tokens over all layers: copies."""
    pools = [parts.cache.layer(layer) for layer in range(parts.cache.shape.num_layers)]
    keys, values = (
        torch.stack([pool.flatten(0, 1)[step.cache_positions] for pool in layers])
        for layers in zip(*pools, strict=True)
    )
    return keys, values
