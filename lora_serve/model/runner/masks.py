"""Masks of rows that obey a grammar: logits of tokens that may not come are -inf before anything else is done to them.

The log-probabilities of such a row are therefore those of the tokens that were really allowed, as in vLLM. Other rows
keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.core.batch import SampleInput
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.model.system.device_memory import to_device


def only_allowed(logits: Tensor, rows: Sequence[SampleInput]) -> tuple[Tensor, dict[int, LoraServeError]]:
    """logits [rows, vocab], with -inf for tokens that a row's grammar excludes; and the errors of rows that cannot go
    on, whose logits stay as they are. The argument itself is not changed.

    Waits for the masks, which were begun before the forward pass; the device has its work by now.
    """
    masks: dict[int, bytes] = {}
    errors: dict[int, LoraServeError] = {}
    for i, row in enumerate(rows):
        if row.allowed is not None:
            try:
                masks[i] = row.allowed.wait()
            except LoraServeError as error:
                errors[i] = error
    if not masks:
        return logits, errors
    packed = _packed(list(masks.values()), logits.shape[1])
    for line, i in zip(packed, masks, strict=True):
        _allow_own_ends(line, rows[i])
        if not line.any():
            errors[i] = InvalidRequestError("The grammar allows no token of this model's vocabulary at this place.")
            line.fill(255)
    bits = np.unpackbits(~packed, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    excluded = to_device(torch.from_numpy(bits), torch.bool, logits.device)
    if len(masks) == len(rows):
        return logits.masked_fill(excluded, float("-inf")), errors
    index = to_device(list(masks), torch.int64, logits.device)
    return logits.index_copy(0, index, logits[index].masked_fill_(excluded, float("-inf"))), errors


def _allow_own_ends(line: npt.NDArray[np.uint8], row: SampleInput) -> None:
    """Where the grammar allows the model's end, the ends that only this row's adapter or the tokenizer has may come."""
    own = row.params.eos_token_ids
    models = [token for token in row.eos_token_ids if token not in own] or row.eos_token_ids
    if own and any(line[token // 8] >> token % 8 & 1 for token in models):
        for token in own:
            line[token // 8] |= 1 << token % 8


def _packed(masks: Sequence[bytes], width: int) -> npt.NDArray[np.uint8]:
    """[rows, width / 8] of masks that may be of other lengths, as adapters have vocabularies of their own."""
    packed = np.zeros((len(masks), -(-width // 8)), dtype=np.uint8)
    for line, mask in zip(packed, masks, strict=True):
        known = np.frombuffer(mask, dtype=np.uint8)[: len(line)]
        line[: len(known)] = known
    if width % 8:
        packed[:, -1] &= (1 << width % 8) - 1
    return packed
