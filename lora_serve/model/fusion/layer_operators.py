"""The two parts of a compiled layer that the compiler does not look into: paged attention, and adapters' deltas.

To the compiler each is an operator with constants; the layer whose compiled code runs is found through a number. So
one compiled function serves all layers of a kind: neither a layer's index nor those of its linear layers are in it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.lora.adapted_model import LinearGroup
from lora_serve.model.lora.expert_stacks import StackLora
from lora_serve.model.step_context import AttentionSettings

Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionSettings], Tensor]  # layer, query, key, value, settings


class RunningLayer:
    """The layer of one model whose compiled code runs; set before each run."""

    def __init__(self, attend: Attend) -> None:
        """`attend`: writes key and value [tokens, num_kv_heads, head_dim] of a layer to the cache and attends."""
        self.attend = attend
        self.layer = -1
        self.groups: Sequence[LinearGroup | StackLora] = ()
        self.number = next(_numbers)
        _running[self.number] = self


_numbers = itertools.count()
_running: weakref.WeakValueDictionary[int, RunningLayer] = weakref.WeakValueDictionary()
_library: Any = torch.library.Library("lora_serve", "FRAGMENT")  # type: ignore[no-untyped-call]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    running: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
) -> Tensor:
    layer = _running[running]
    settings = AttentionSettings(scale, window, softcap, sinks, chunk)
    return layer.attend(layer.layer, query, key, value, settings).contiguous()


def _add_lora(y: Tensor, x: Tensor, experts: Tensor | None, running: int, place: int) -> None:
    _running[running].groups[place].adapt(y, x, *(() if experts is None else (experts,)))


def _like_attended(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _like_added(*_: object) -> None:
    return None


_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int running, float scale, int? window, "
    "float? softcap, int? chunk) -> Tensor"
)
_library.define("add_lora_(Tensor(a!) y, Tensor x, Tensor? experts, int running, int place) -> ()")
for _device in ("CPU", "CUDA"):  # not `custom_op`: its wrapper takes longer than a launch
    _library.impl("attend", _attend, _device)
    _library.impl("add_lora_", _add_lora, _device)
torch.library.register_fake("lora_serve::attend", _like_attended, lib=_library)
torch.library.register_fake("lora_serve::add_lora_", _like_added, lib=_library)


def attend(query: Tensor, key: Tensor, value: Tensor, running: RunningLayer, settings: AttentionSettings) -> Tensor:
    """Attention of the running layer, as an operator: query [tokens, num_heads, head_dim] -> the same shape.

    It writes the cache, unseen by the compiler, and is called once a layer.
    """
    found: Tensor = torch.ops.lora_serve.attend(
        query, key, value, settings.sinks, running.number, settings.scale, settings.window, settings.softcap,
        settings.chunk,
    )  # fmt: skip
    return found


def add_lora(y: Tensor, x: Tensor, experts: Tensor | None = None, *, running: RunningLayer, place: int) -> None:
    """`adapt` of the running layer's group, or stack of experts, at a place, as an operator: changes y."""
    torch.ops.lora_serve.add_lora_(y, x, experts, running.number, place)
