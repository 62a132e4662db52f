"""Paged attention over ragged rows. The folder is the list of backends: the name of a file is a value of --attention.

A new backend is a new file, named nowhere else: `class Backend` (see `Attention`) and what `model/__init__.py` asks of
every file. The contract tests run over all files (tests/contracts/test_attention.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from lora_serve.model import load_backend
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step_context import AttentionSettings, StepInputs


class Attention(Protocol):
    """The class that a file of this folder provides as `Backend`."""

    reads_tiles: bool  # it takes `StepInputs.tiled`, so that a captured graph can hold rows of several tokens

    def __init__(self, cache: KVCache) -> None: ...

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: StepInputs, settings: AttentionSettings
    ) -> Tensor:
        """Causal attention of each row over its own cached tokens; K and V of the step are already cached.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim];
        returns [num_tokens, num_heads, head_dim].
        """


def over_rows(
    attend: Callable[[nn.Module, Tensor, Tensor, Tensor, AttentionSettings], Tensor], chunks: Mapping[nn.Module, int]
) -> Callable[..., Any]:
    """transformers' attention (query [1, num_heads, T, D], key, value [1, num_kv_heads, T, D], all after RoPE) by a
    function of packed rows: the module, query, key and value [T, heads, D], and the layer's constants. `chunks`: see
    `Observation`, as transformers tells them by masks alone.

    Values that are narrower than keys (multi-head latent attention, DeepSeek-AI, arXiv 2405.04434), or wider, get zeros
    behind the shorter ones.
    """

    def call(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        scale, sinks = query.shape[-1] ** -0.5 if scaling is None else scaling, None if s_aux is None else s_aux.float()
        settings = AttentionSettings(scale, sliding_window, softcap, sinks, chunks.get(module))
        size = value.shape[-1]
        query, key, value = _of_one_size(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
        return attend(module, query, key, value, settings)[None, ..., :size], None

    return call


def _of_one_size(*tensors: Tensor) -> list[Tensor]:
    size = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor for tensor in tensors]


def create_attention(name: str, cache: KVCache) -> Attention:
    """The backend of file `name`; "auto": the preferred one of those that run here. Raises ConfigError."""
    backend: Attention = load_backend(sys.modules[__name__], name, "--attention", cache).Backend(cache)
    return backend
