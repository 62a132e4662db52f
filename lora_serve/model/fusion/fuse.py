"""Tries the replacements of every layer and keeps those that prove equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.attention import Attention
from lora_serve.model.fusion import decoder_layer, gated_mlp, norm, rotary_attention
from lora_serve.model.fusion.rotary_attention import AttentionSettings
from lora_serve.model.fusion.trace import Call, agrees, calls_of, is_close, probe_step
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import layers
from lora_serve.model.native.layers import LayerKernels
from lora_serve.model.step.step_context import StepContext, StepInputs


@dataclass(frozen=True, slots=True)
class Fuser:
    """What a replacement is built from."""

    module: nn.Module
    vocab_size: int
    max_model_len: int
    cache: KVCache
    slots: LoraSlots
    attention: Attention
    context: StepContext[StepInputs]
    run: Callable[[StepInputs], Any]  # the model as it is, with `attention`'s recorder in place
    settings: Mapping[int, AttentionSettings]  # by layer, known after `run`
    kernels: LayerKernels = field(default_factory=LayerKernels.load)

    def fuse(self) -> Counter[str]:
        """How many layers of each kind were replaced."""
        kinds = {"norm": norm.could_be, "gated_mlp": gated_mlp.could_be, "attention": rotary_attention.could_be}
        found = self._replace(kinds)
        return found + self._replace({"decoder_layer": decoder_layer.could_be})

    def _replace(self, kinds: Mapping[str, Callable[[nn.Module], bool]]) -> Counter[str]:
        members = {
            module: kind for module in self.module.modules() for kind, could_be in kinds.items() if could_be(module)
        }
        step = probe_step(self.cache, self.vocab_size, self.max_model_len)
        with calls_of(list(members)) as calls:
            self.run(step)
        cached = self._cached(step)
        done: Counter[str] = Counter()
        with self.context.running(step):
            for module, kind in members.items():
                found = self._proven(module, kind, calls.get(module, []), step, cached)
                if found is not None:
                    module.forward = found
                    done[kind] += 1
        return done

    def _proven(
        self, module: nn.Module, kind: str, calls: list[Call], step: StepInputs, cached: tuple[Tensor, Tensor]
    ) -> Callable[..., Any] | None:
        """The first replacement that agrees with all calls; None if there is none."""
        for candidate in self._candidates(module, kind):
            if not calls or not all(agrees(call, candidate) for call in calls):
                continue
            if kind in ("attention", "decoder_layer") and not all(map(is_close, self._cached(step), cached)):
                continue
            return candidate
        return None

    def _candidates(self, module: nn.Module, kind: str) -> Iterator[Callable[..., Any]]:
        if kind == "norm":
            yield from norm.candidates(module, self.kernels)
        elif kind == "gated_mlp":
            yield from gated_mlp.candidates(module, self.kernels)
        elif kind == "decoder_layer":
            if (layer := decoder_layer.candidate(module, self._path(module), self.slots)) is not None:
                yield layer
        elif (settings := self.settings.get(getattr(module, "layer_idx", -1))) is not None:
            found = rotary_attention.candidate(
                module,
                self._path(module),
                self.slots,
                settings,
                self.cache,
                self.attention,
                self.context,
                self.kernels,
            )
            if found is not None:
                yield found

    def _path(self, module: nn.Module) -> str:
        return next((path for path, one in self.module.named_modules() if one is module), "")

    def _cached(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """K and V of the step's tokens over all layers: copies."""
        pools = [self.cache.layer(layer) for layer in range(self.cache.shape.num_layers)]
        keys, values = zip(*pools, strict=True)
        return (
            torch.stack([pool.flatten(0, 1)[step.cache_positions] for pool in keys]),
            torch.stack([pool.flatten(0, 1)[step.cache_positions] for pool in values]),
        )


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing can be fused; None: it can."""
    return layers.why_not(device, dtype)
