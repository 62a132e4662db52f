"""Steps in which an adapter has a vocabulary of its own size: more tokens than the base model's, or fewer.

The base model runs on ids of its own vocabulary; the adapter's embedding and output head, which it must bring, see
the true ids and write as many logits as it has tokens. Rows of every size share the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lora_serve.model.system.transfer import to_device


class OwnRows(Protocol):
    """What the output layer must know when adapters have one with another number of rows."""

    @property
    def slots(self) -> frozenset[int]:
        """Those whose adapters have an output layer of their own."""

    @property
    def width(self) -> int:
        """Columns of the step's logits: the largest layer's, the base model's at least."""


@dataclass(frozen=True, slots=True)
class StepVocabularies:
    """What such a step has besides its other inputs; steps of the base model's vocabulary alone have none."""

    token_ids: Tensor  # [1, num_tokens] int64, the true ids
    slots: frozenset[int]  # those whose adapters have a vocabulary of their own
    width: int  # columns of the step's logits: the largest vocabulary in it, the base model's at least
    sizes: Tensor  # [num_logits] int64: the vocabulary behind each row of the logits

    @staticmethod
    def of(
        token_ids: Tensor, slots: Mapping[int, int], sizes: Sequence[int], base_size: int, device: torch.device
    ) -> StepVocabularies:
        """`slots`: sizes by slot. `sizes`: for each row of the logits; none, if the step wants no logits."""
        width = max(base_size, *slots.values())
        counted = to_device(sizes or [width], torch.int64, device)
        return StepVocabularies(token_ids, frozenset(slots), width, counted)

    def cut(self, logits: Tensor) -> Tensor:
        """logits [num_logits, width], in place: what is no token of a row's vocabulary becomes -inf.

        Only here, once the model has finished: what it does to logits (soft caps, scales) is no matter of columns
        that are not there.
        """
        columns = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill_(columns >= self.sizes[:, None], float("-inf"))
