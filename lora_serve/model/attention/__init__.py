"""Paged attention over ragged rows: one file per backend, one contract test for all."""

from __future__ import annotations

import importlib
from typing import Protocol

from torch import Tensor

from lora_serve.core.errors import ConfigError
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step.step_context import StepInputs


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
    """The backend of file `name`; "auto": varlen where CUDA has it, native where a C compiler made it, else sdpa.

    Raises ConfigError.
    """
    varlen, native = (importlib.import_module(f"{__name__}.{choice}") for choice in ("varlen", "native"))
    why_not = varlen.why_not(cache)
    if name == "varlen" and why_not is not None:
        raise ConfigError(f"--attention varlen: {why_not}")
    if name == "auto":
        name = "varlen" if why_not is None else "native" if native.why_not(cache) is None else "sdpa"
    module = importlib.import_module(f"{__name__}.{name}")
    backend: Attention = module.Backend(cache)
    return backend
