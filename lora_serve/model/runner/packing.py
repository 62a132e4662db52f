"""Rows of a step as tensors, packed in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_serve.core.batch import Row
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import (
    DecodeRows,
    PrefillRow,
    StepInputs,
    StepVocabularies,
    passes_of,
)
from lora_serve.model.system.device_memory import columns_to_device


@dataclass(frozen=True, slots=True)
class LogitSpan:
    """The place of a row's logits among all logits of the step: those of its last positions, or of all of them."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _PackedRows:
    """The packed tokens of each row, and those whose logits are wanted."""

    spans: list[LogitSpan]
    logit_positions: list[int]
    bounds: list[tuple[int, int]]  # packed tokens start .. end of each row


@dataclass(frozen=True, slots=True)
class StepPacker:
    """Packs the rows of a step; rows of one token first."""

    _cache: KVCache
    _slots: LoraSlots
    _base_size: int  # the base model's vocabulary
    _device: torch.device

    def pack(self, rows: Sequence[Row]) -> tuple[StepInputs, list[LogitSpan]]:
        """The step's tensors, and where each row's logits will lie."""
        layout = _layout(rows)
        num_decode = sum(len(row.token_ids) == 1 for row in rows)
        kinds = range(self._cache.shape.num_kinds)
        ids, positions, logit_positions, lengths, is_long, *placed = columns_to_device(
            [
                [token for row in rows for token in row.token_ids],
                [p for row in rows for p in _positions(row)],
                layout.logit_positions or [0],
                [row.start + 1 for row in rows[:num_decode]],
                [row.is_long for row in rows for _ in row.token_ids] if any(row.is_long for row in rows) else [],
                *(
                    column
                    for kind in kinds
                    for column in self._placed(rows, [row.tables[kind] for row in rows], num_decode)
                ),
            ],
            self._device,
        )
        vocabularies = self._vocabularies(rows, layout.spans, ids[None])
        adapters = [row.adapters for row in rows]
        ends = [row.start + len(row.token_ids) for row in rows]
        size = len(placed) // len(kinds)
        own, *windowed = (
            self._fields(rows, layout.bounds, lengths, *placed[kind * size : (kind + 1) * size]) for kind in kinds
        )
        outputs = [(end - span.end + span.start, end) for span, end in zip(layout.spans, ends, strict=True)]
        step = StepInputs(
            token_ids=ids[None] if vocabularies is None else ids[None].clamp(max=self._base_size - 1),
            position_ids=positions[None],
            **own,
            logit_positions=logit_positions,
            lora=passes_of(adapters, [(row.start, end) for row, end in zip(rows, ends, strict=True)], self._device),
            lora_logits=passes_of(adapters, outputs, self._device),
            vocabularies=vocabularies,
            is_long=is_long[None] if len(is_long) else None,
        )
        for fields in windowed:
            step = replace(step, windowed=replace(step, prepared={}, **fields))
        return step, layout.spans

    def vocab_size(self, row: Row) -> int:
        """The vocabulary of the row's adapter; 0: the base model's. An adapter with its own is never composed with
        others.
        """
        return self._slots.vocab_size(row.adapters[0].slot.index) if row.adapters else 0

    def _vocabularies(
        self, rows: Sequence[Row], spans: Sequence[LogitSpan], token_ids: Tensor
    ) -> StepVocabularies | None:
        own = {row.adapters[0].slot.index: size for row in rows if (size := self.vocab_size(row))}
        if not own:
            return None
        sizes = [
            self.vocab_size(row) or self._base_size
            for row, span in zip(rows, spans, strict=True)
            for _ in range(span.start, span.end)
        ]
        return StepVocabularies.of(token_ids, own, sizes, self._base_size, self._device)

    def _placed(
        self, rows: Sequence[Row], tables: Sequence[tuple[int, ...]], num_decode: int
    ) -> Iterator[Sequence[int]]:
        """The places of all tokens, the table of rows of one token, and the blocks of each longer row."""
        size, width = self._cache.block_size, max(map(len, tables[:num_decode]), default=0)
        yield [
            table[p // size] * size + p % size for row, table in zip(rows, tables, strict=True) for p in _positions(row)
        ]
        yield [b for table in tables[:num_decode] for b in (*table, *[0] * (width - len(table)))]
        yield from tables[num_decode:]

    @staticmethod
    def _fields(
        rows: Sequence[Row],
        bounds: Sequence[tuple[int, int]],
        lengths: Tensor,
        places: Tensor,
        table: Tensor,
        *blocks: Tensor,
    ) -> dict[str, Any]:
        """The fields of a step that follow from its blocks, as they came from `_placed`."""
        long = slice(len(lengths), None)
        return {
            "cache_positions": places,
            "decode": DecodeRows(len(lengths), table.view(len(lengths), -1 if len(lengths) else 0), lengths),
            "prefill": tuple(
                PrefillRow(start, end, row.start, own)
                for row, own, (start, end) in zip(rows[long], blocks, bounds[long], strict=True)
            ),
        }


def _positions(row: Row) -> range:
    return range(row.start, row.start + len(row.token_ids))


def _layout(rows: Sequence[Row]) -> _PackedRows:
    layout, position = _PackedRows([], [], []), 0
    for row in rows:
        end = position + len(row.token_ids)
        first = position if row.prompt_targets else end - row.num_sampled
        num_before = len(layout.logit_positions)
        layout.spans.append(LogitSpan(num_before, num_before + end - first))
        layout.logit_positions.extend(range(first, end))
        layout.bounds.append((position, end))
        position = end
    return layout
