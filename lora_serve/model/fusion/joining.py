"""Linear layers of one input as one product with one launch for their adapters, where it is proved to change no result.

A pass of a few tokens tells which layers of a decoder layer are called one after the other with the very same tensor:
queries, keys and values; gate and up. Their weights then lie in one piece (see `LinearGroup`), and the decoder layer
runs beside itself as it was: if it computes something else, each of its linear layers is alone again.

This is for GPUs; on CPUs the kinds of `kinds/` join what they know.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.fusion.compiled import PROBES, LayerParts, agree, decoder_layers, results_of
from lora_serve.model.fusion.parts import calls_of, probe_step
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear

_log = logging.getLogger(__name__)
_Members = tuple[LoraLinear, ...]


@torch.inference_mode()
def join_linears(parts: LayerParts, vocab_size: int, max_model_len: int) -> list[LinearGroup]:
    """Joins what can be, logs how many groups there are, and returns them."""
    layers = decoder_layers(parts.module)
    steps = [probe_step(parts.cache, vocab_size, max_model_len, count) for count in PROBES]
    calls, inputs = [], []
    for step in steps:
        with calls_of(layers) as found, _inputs_of(parts.module) as given:
            parts.run(step)
        calls.append(found)
        inputs.append(given)
    is_own = _count_uses(parts.module)
    joined: list[LinearGroup] = []
    for layer in layers:
        of_layer = [one.get(layer, []) for one in calls]
        first, second = (list(_groups(layer, given)) for given in inputs)
        wanted = [members for members in first if members in second and all(is_own[part] == 1 for part in members)]
        if wanted and all(len(one) == 1 for one in of_layer):
            probes = [(call, step) for (call,), step in zip(of_layer, steps, strict=True)]
            before = results_of(parts, layer.forward, probes)
            groups = [group for members in wanted if (group := _join(members)) is not None]
            if agree(before, results_of(parts, layer.forward, probes)):
                joined += groups
            else:
                _separate(groups)
    _log.info("linear layers joined: %d, in %d groups", sum(len(group.parts) for group in joined), len(joined))
    return joined


@contextmanager
def _inputs_of(module: nn.Module) -> Iterator[list[tuple[LoraLinear, Tensor]]]:
    """Notes each call of a linear layer inside the block, with its input itself: no two share an identity."""
    found: list[tuple[LoraLinear, Tensor]] = []

    def note(linear: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(linear, LoraLinear)
        found.extend((linear, x) for x in arguments)

    with ExitStack() as hooks:
        for part in module.modules():
            if isinstance(part, LoraLinear):
                hooks.enter_context(part.register_forward_pre_hook(note))
        yield found


def _groups(layer: nn.Module, inputs: Sequence[tuple[LoraLinear, Tensor]]) -> Iterator[_Members]:
    """Linear layers of a decoder layer that were called once, one after the other with the same object."""
    inside = set(layer.modules())
    counts = Counter(linear for linear, _ in inputs)
    for _, run in itertools.groupby(inputs, key=lambda call: id(call[1])):
        members = tuple(linear for linear, _ in run)
        if len(members) > 1 and all(counts[linear] == 1 and linear in inside for linear in members):
            yield members


def _count_uses(module: nn.Module) -> dict[LoraLinear, int]:
    """How many modules read a linear layer's weight: with two, joining would leave a second copy of it."""
    linears = {part: part.base.weight.stored for part in module.modules() if isinstance(part, LoraLinear)}
    tensors = itertools.chain(module.parameters(), (stored for stored in linears.values() if stored is not None))
    uses = Counter(tensor.data_ptr() for tensor in tensors)
    return {linear: 0 if stored is None else uses[stored.data_ptr()] for linear, stored in linears.items()}


def _join(members: _Members) -> LinearGroup | None:
    group = LinearGroup.of(members)
    if group is not None:
        for linear in members:
            linear.group = group
    return group


def _separate(groups: Sequence[LinearGroup]) -> None:
    """Each layer computes its own product again, by its view of the joined weight."""
    for group in groups:
        for linear in group.parts:
            linear.group = LinearGroup((linear,), linear.base)
