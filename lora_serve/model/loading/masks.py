"""The masks that transformers makes for one watched pass, and the settings of attention that say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask

from lora_serve.model.step_context import AttentionSettings


class WatchedMasks:
    """transformers' plain masks; tells afterwards which of them end with chunks, however few tokens it was made for."""

    def __init__(self) -> None:
        self._chunked: list[tuple[Tensor, int]] = []

    def __call__(self, *, mask_function: Callable[..., Any], config: Any, device: torch.device, **given: Any) -> Any:
        mask = eager_mask(mask_function=mask_function, config=config, device=device, **given)
        size = given.get("local_size")
        if size is not None and size == getattr(config, "attention_chunk_size", None):
            zero = torch.zeros((), dtype=torch.int64, device=device)
            if not mask_function(zero, zero, zero + size, zero + size - 1):
                self._chunked.append((mask, size))
        return mask

    def chunk_of(self, mask: Tensor | None) -> int | None:
        """The size of the chunks that a mask is of; None: of none."""
        return next((size for one, size in self._chunked if one is mask), None)


def is_applied(mask: Tensor, settings: AttentionSettings) -> bool:
    """True for the mask [..., T, T] of tokens that see themselves and what these settings let them see before."""
    tokens = torch.arange(mask.shape[-1], device=mask.device)
    is_seen = (tokens <= tokens[:, None]) & (tokens >= settings.first_seen(tokens)[:, None])
    if mask.shape[-2:] != is_seen.shape:
        return False
    return bool((mask == is_seen if mask.dtype == torch.bool else torch.where(is_seen, mask == 0, mask < -1e4)).all())
