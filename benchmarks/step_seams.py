"""Where a step's time goes, seen at the seams of `lora_serve/model`, which are wrapped while it is looked at.

`FrozenLinear`, every LoRA kernel's `add`, every attention backend with the write into its cache, and the sampler: what
is none of these is called the rest. A call inside another counts for the inner one only. Decoder layers that run as
one native call have no seams inside: they run by their parts while they are looked at, which takes longer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternating import Clock
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.fusion.kinds.decoder_layer import FusedDecoderLayer
from lora_serve.model.fusion.kinds.latent_layer import NativeLatentAttention
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.native.operators import PackedLinear
from lora_serve.model.runner import model_runner as runner_module

PARTS = ("base GEMMs", "LoRA", "attention", "output head", "sampling", "rest")
Namer = Callable[[tuple[Any, ...]], str]  # a call's arguments -> which part it belongs to


@dataclass(frozen=True, slots=True)
class Product:
    """One call of a frozen layer, or of several joined: with which method, on an input of which shape."""

    layer: FrozenLinear | PackedLinear
    method: str  # "sums", "product" or "__call__"
    arguments: tuple[Any, ...]  # after the input
    num_weights: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class PartTimes:
    """Seconds by part; a part that runs inside another is taken out of the outer one."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # seconds of the calls inside the one that runs, by depth

    def timed(self, call: Callable[..., Any], namer: Namer) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                taken = self._clock() - start
                self.seconds[namer(args)] += taken - self._inner.pop()
                self._inner[-1] += taken

        return wrapper


def parts_of(run: Callable[[], object], vocab_size: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Seconds of one `run` by part, and in "total" as a whole."""
    times = PartTimes(clock)

    def of_linear(args: tuple[Any, ...]) -> str:
        return "output head" if args[0].out_features == vocab_size else "base GEMMs"

    with contextlib.ExitStack() as stack:
        for kind in (FusedDecoderLayer, NativeLatentAttention):
            stack.enter_context(_replaced(kind, "__call__", _by_parts))
        for owner, name, part in _seams():
            namer: Namer = of_linear if owner in (FrozenLinear, PackedLinear) else lambda _, part=part: part  # type: ignore[misc]
            stack.enter_context(_replaced(owner, name, times.timed(getattr(owner, name), namer)))
        start = clock()
        run()
        total = clock() - start
    found = {part: times.seconds.get(part, 0.0) for part in PARTS}
    found["rest"] = total - sum(found.values())
    return found | {"total": total}


def products_of(run: Callable[[], object]) -> list[Product]:
    """Every outermost call of a frozen layer in one `run`, in order."""
    found: list[Product] = []
    depth = [0]

    def noted(method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not depth[0]:
                found.append(Product(layer, method, args, num_weights_of(layer), tuple(x.shape), x.dtype))
            depth[0] += 1
            try:
                return call(layer, x, *args, **kwargs)
            finally:
                depth[0] -= 1

        return wrapper

    with contextlib.ExitStack() as stack:
        for kind in (FusedDecoderLayer, NativeLatentAttention):
            stack.enter_context(_replaced(kind, "__call__", _by_parts))
        for owner, name in ((FrozenLinear, "sums"), (FrozenLinear, "product"), (PackedLinear, "__call__")):
            stack.enter_context(_replaced(owner, name, noted(name, getattr(owner, name))))
        run()
    return found


def num_weights_of(layer: FrozenLinear | PackedLinear) -> int:
    """in times out features."""
    return layer.in_features * layer.out_features


def _by_parts(layer: FusedDecoderLayer | NativeLatentAttention, *args: Any, **kwargs: Any) -> Any:
    return layer.by_parts(*args, **kwargs)


def _seams() -> Iterator[tuple[Any, str, str]]:
    """(owner, attribute, part) of everything that is wrapped; kernels and backends as far as they are loaded."""
    yield FrozenLinear, "sums", ""
    yield FrozenLinear, "product", ""
    yield PackedLinear, "__call__", ""
    yield KVCache, "write", "attention"
    yield runner_module, "draw_rows", "sampling"
    for name, module in sorted(sys.modules.items()):
        if name.startswith("lora_serve.model.lora.kernels.") and hasattr(module, "Kernel"):
            yield module.Kernel, "add", "LoRA"
        if name.startswith("lora_serve.model.attention.") and hasattr(module, "Backend"):
            yield module.Backend, "__call__", "attention"


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    was_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # it was inherited
