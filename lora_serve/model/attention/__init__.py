"""Paged attention over ragged rows: one file per backend, one contract test for all."""

from __future__ import annotations

import importlib
from typing import Protocol

from torch import Tensor

from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step_context import StepInputs


class Attention(Protocol):
    """`file.py` holds `class Backend` with this constructor and method; the file's name is the config value."""

    def __init__(self, cache: KVCache) -> None: ...

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: StepInputs,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention of each row over its own cached tokens; K and V of the step are already cached.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim];
        returns [num_tokens, num_heads, head_dim]. With `window` w a token sees itself and the w - 1 before it.
        With `softcap` c scores become c * tanh(score / c).
        """


def create_attention(name: str, cache: KVCache) -> Attention:
    """The backend of file `name`; "auto": native where a C compiler made it, else sdpa. Raises ConfigError."""
    if name == "auto":
        native = importlib.import_module(f"{__name__}.native")
        name = "native" if native.why_not(cache) is None else "sdpa"
    module = importlib.import_module(f"{__name__}.{name}")
    backend: Attention = module.Backend(cache)
    return backend
