"""One step of pooling as tensors, and the two ways to lay its rows out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_serve.core.batch import RowAdapter
from lora_serve.model.step.step_context import LoraTokens, passes_of
from lora_serve.model.step.vocabularies import OutputWidths


@dataclass(frozen=True, slots=True)
class PoolingRow:
    """One prompt, never cut."""

    token_ids: tuple[int, ...]
    token_type_ids: tuple[int, ...] = ()  # empty: all 0
    adapters: tuple[RowAdapter, ...] = ()
    is_long: bool = False  # see `LongRope`


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Packed rows of like lengths, which attend in one call: `length` is the longest."""

    index: Tensor  # [num_rows, length] packed positions; beyond a row's end its first token again
    lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.index.shape[1]

    @property
    def is_even(self) -> bool:
        return min(self.lengths) == self.length


@dataclass(frozen=True, slots=True)
class PoolingStep:
    """Everything one forward pass reads besides weights.

    Rows lie end to end ([1, num_tokens], `groups` says which tokens attend to each other) or padded
    ([num_rows, length], with an attention mask). Flat positions count tokens row after row in either.
    """

    token_ids: Tensor  # [1, num_tokens] or [num_rows, length] int64, as all of the same shape below
    position_ids: Tensor
    token_type_ids: Tensor | None  # None: the model has none
    attention_mask: Tensor | None  # None: packed
    groups: tuple[RowGroup, ...]  # empty: padded
    token_index: Tensor | None  # [num_tokens] flat positions of the tokens that are no padding; None: all
    lengths: Tensor  # [num_rows] int64
    firsts: Tensor  # [num_rows] flat positions
    lasts: Tensor  # [num_rows] flat positions
    lora: tuple[LoraTokens, ...]
    lora_logits: tuple[LoraTokens, ...]  # of the pooled rows
    vocabularies: OutputWidths | None = None
    is_long: Tensor | None = None  # not 0 for the tokens of long rows; None: there are none
    masks: dict[tuple[int, bool, int | None], Tensor | None] = field(default_factory=dict)  # attention's own


@dataclass(frozen=True, slots=True)
class Layout:
    """The way in which a model's rows become tensors."""

    is_ragged: bool
    has_types: bool
    first_position: int  # RoBERTa's begin after its padding token's id, which is the position of such tokens
    ignored_last: int | None  # a token that is never a row's last one (a decoder's classifier); None: any may be
    device: torch.device

    def step(self, rows: Sequence[PoolingRow], own_labels: OutputWidths | None = None) -> PoolingStep:
        lengths = [len(row.token_ids) for row in rows]
        widths = lengths if self.is_ragged else [max(lengths)] * len(rows)
        starts = [0, *itertools.accumulate(widths)][:-1]
        adapters = [row.adapters for row in rows]
        long = [(int(row.is_long),) * len(row.token_ids) for row in rows]
        types = [row.token_type_ids or (0,) * len(row.token_ids) for row in rows]
        return PoolingStep(
            token_ids=self._laid([row.token_ids for row in rows], widths),
            position_ids=self._laid([self._positions(row.token_ids) for row in rows], widths),
            token_type_ids=self._laid(types, widths) if self.has_types else None,
            attention_mask=None if self.is_ragged else self._laid([(1,) * length for length in lengths], widths),
            groups=self._groups(starts, lengths) if self.is_ragged else (),
            token_index=None if self.is_ragged else self._tensor(_spans(starts, lengths)),
            lengths=self._tensor(lengths),
            firsts=self._tensor(starts),
            lasts=self._tensor([start + self._last(row.token_ids) for start, row in zip(starts, rows, strict=True)]),
            lora=passes_of(adapters, [(0, width) for width in widths], self.device),
            lora_logits=passes_of(adapters, [(length - 1, length) for length in lengths], self.device),
            vocabularies=own_labels,
            is_long=self._laid(long, widths) if any(row.is_long for row in rows) else None,
        )

    def _laid(self, rows: Sequence[Sequence[int]], widths: Sequence[int]) -> Tensor:
        padded = [(*row, *[0] * (width - len(row))) for row, width in zip(rows, widths, strict=True)]
        return self._tensor(list(itertools.chain(*padded))).view(1 if self.is_ragged else len(rows), -1)

    def _positions(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self.first_position == 0:
            return range(len(token_ids))
        padding, found, position = self.first_position - 1, list[int](), self.first_position - 1
        for token in token_ids:
            position += token != padding
            found.append(padding if token == padding else position)
        return found

    def _last(self, token_ids: Sequence[int]) -> int:
        ends = range(len(token_ids) - 1, -1, -1)
        return next((i for i in ends if token_ids[i] != self.ignored_last), 0)

    def _groups(self, starts: Sequence[int], lengths: Sequence[int]) -> tuple[RowGroup, ...]:
        """Rows whose lengths have the same next power of two."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        found = []
        for _, group in itertools.groupby(order, key=lambda i: max(16, 1 << (lengths[i] - 1).bit_length())):
            rows = list(group)
            length = max(lengths[i] for i in rows)
            index = [[starts[i] + (j if j < lengths[i] else 0) for j in range(length)] for i in rows]
            found.append(RowGroup(self._tensor(index), tuple(lengths[i] for i in rows)))
        return tuple(found)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _spans(starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
