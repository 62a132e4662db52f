"""Steps in which an adapter has a vocabulary of its own size: more tokens than the base model's, or fewer.

The base model runs on ids of its own vocabulary; the adapter's embedding and output head, which it must bring, see the
true ids and write as many logits as it has tokens. Rows of every size share the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.model.system.transfer import to_device


@dataclass(frozen=True, slots=True)
class OutputWidths:
    """The adapters of a step whose output layer has its own number of rows: of tokens, or of labels."""

    slots: frozenset[int]
    width: int  # columns of the step's logits: the largest layer's, the base model's at least


@dataclass(frozen=True, slots=True)
class StepVocabularies(OutputWidths):
    """The vocabularies of a step in which an adapter has its own."""

    token_ids: Tensor  # [1, num_tokens] int64, the true ids
    sizes: Tensor  # [num_logits] int64: the vocabulary behind each row of the logits

    @staticmethod
    def of(
        token_ids: Tensor, slots: Mapping[int, int], sizes: Sequence[int], base_size: int, device: torch.device
    ) -> StepVocabularies:
        """`slots`: sizes by slot. `sizes`: one per row of the logits; none if the step wants no logits."""
        width = max(base_size, *slots.values())
        counted = to_device(sizes or [width], torch.int64, device)
        return StepVocabularies(frozenset(slots), width, token_ids, counted)

    def cut(self, logits: Tensor) -> Tensor:
        """Sets logits [num_logits, width] of tokens beyond a row's vocabulary to -inf, in place.

        Done once the model has finished: what it does to logits (soft caps, scales) does not concern columns that do
        not exist.
        """
        columns = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill_(columns >= self.sizes[:, None], float("-inf"))
