"""Runs one batch: rows to packed tensors, one forward pass, logits to one token per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.core.batch import Batch, BlockMoves, Row, RowAdapter, RowOutput, SampleInput, SlotRef
from lora_serve.core.commands import ProbeResult
from lora_serve.core.errors import (
    InternalError,
    InvalidRequestError,
    LoraServeError,
    NumericalError,
)
from lora_serve.core.events import TokenLogprobs
from lora_serve.model.base_model import BaseModel
from lora_serve.model.device_memory import within_memory
from lora_serve.model.host_adapter import HostAdapter
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora_slots import LoraSlots
from lora_serve.model.sampler import logprobs_of, sample
from lora_serve.model.step_context import DecodeRows, PrefillRow, StepInputs, passes_of
from lora_serve.model.vocabularies import OwnVocabularies

_LOGPROB_ROWS = 64  # positions whose full log-softmax is held at once


@dataclass(frozen=True, slots=True)
class _LogitSpan:
    """Where a row's logits lie among all logits of the step."""

    start: int
    end: int


class ModelRunner:
    """The runner that `engine/engine.py` speaks to; it knows slots, blocks and rows, but no requests and no tenants."""

    def __init__(self, model: BaseModel, cache: KVCache, slots: LoraSlots, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._slots = slots
        self._device = device

    def load_slot(self, slot: SlotRef, adapter: HostAdapter) -> None:
        """Put an adapter's weights into a device slot."""
        self._slots.load(slot, adapter)

    def clear_slot(self, index: int) -> None:
        """Free a device slot's weights."""
        self._slots.clear(index)

    def run(self, batch: Batch) -> list[RowOutput]:
        """One forward pass; one output per row, in the batch's order. A row's own fault is in its `error`.

        Raises DeviceMemoryError; then what the attempt had allocated is free again.
        """
        return within_memory(self._device, lambda: self._run(batch))

    def move_blocks(self, moves: BlockMoves) -> None:
        """Copy KV blocks to host memory, then others back; done when it returns."""
        self._cache.move(moves)

    def _run(self, batch: Batch) -> list[RowOutput]:
        self._cache.zero(batch.fresh_blocks)
        refused = {row.sequence_id: error for row in batch.rows if (error := self._refusal(row)) is not None}
        rows = sorted(
            (row for row in batch.rows if row.sequence_id not in refused), key=lambda row: len(row.token_ids) > 1
        )
        outputs = {row_id: RowOutput(row_id, None, error=error) for row_id, error in refused.items()}
        if rows:
            outputs.update(self._run_rows(rows))
        return [outputs[row.sequence_id] for row in batch.rows]

    @torch.inference_mode()
    def probe(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> ProbeResult:
        """The prompt as three rows of one batch: base, adapter, base again. Uses the cache's spare blocks."""
        self._slots.check(adapter.slot)
        blocks = self._cache.spare_blocks(3, len(token_ids))
        rows = [
            Row(i, token_ids, 0, table, adapters, None, token_ids)
            for i, (table, adapters) in enumerate(zip(blocks, ((), (adapter,), ()), strict=True))
        ]
        self._cache.zero([block for table in blocks for block in table])
        step, _ = self._pack(rows)
        known = self._slots.vocab_size(adapter.slot.index) or self._model.spec.vocab_size
        logits = self._model.logits(step)[:, : min(known, self._model.spec.vocab_size)]  # what both can say
        base, changed, again = logits.reshape(3, len(token_ids), -1)
        return ProbeResult(
            (changed - base).abs().max().item(), (again - base).abs().max().item(), base.abs().max().item()
        )

    def _refusal(self, row: Row) -> LoraServeError | None:
        try:
            for adapter in row.adapters:
                self._slots.check(adapter.slot)
        except InternalError as error:
            return error
        size = self._vocab_size(row)
        if size and max(row.token_ids) >= size:  # the base model's rows were checked at the door alone
            return InvalidRequestError(f"The token ids must be below {size}, the adapter's vocabulary.", param="prompt")
        return None

    def _vocab_size(self, row: Row) -> int:
        """Of the row's adapter; 0: the base model's. An adapter with its own is never composed with others."""
        return self._slots.vocab_size(row.adapters[0].slot.index) if row.adapters else 0

    @torch.inference_mode()
    def _run_rows(self, rows: Sequence[Row]) -> dict[int, RowOutput]:
        """rows: those of one token first."""
        step, spans = self._pack(rows)
        logits = self._model.logits(step)
        prompt_logprobs = {
            row.sequence_id: _prompt_logprobs(logits, row, span) for row, span in zip(rows, spans, strict=True)
        }
        sampled = [
            (row, row.sample, span.end - 1) for row, span in zip(rows, spans, strict=True) if row.sample is not None
        ]
        chosen = self._sample(logits, sampled)
        return {
            row.sequence_id: chosen.get(row.sequence_id, RowOutput(row.sequence_id, None))
            if not prompt_logprobs[row.sequence_id]
            else _with_prompt(chosen.get(row.sequence_id), row.sequence_id, prompt_logprobs[row.sequence_id])
            for row in rows
        }

    def _pack(self, rows: Sequence[Row]) -> tuple[StepInputs, list[_LogitSpan]]:
        """The step's tensors, and where each row's logits will lie."""
        num_decode = sum(len(row.token_ids) == 1 for row in rows)
        spans, logit_positions, prefill, position = list[_LogitSpan](), list[int](), list[PrefillRow](), 0
        for row in rows:
            end = position + len(row.token_ids)
            first = position if row.prompt_targets else end - 1 if row.sample is not None else end
            spans.append(_LogitSpan(len(logit_positions), len(logit_positions) + end - first))
            logit_positions.extend(range(first, end))
            if len(row.token_ids) > 1:
                prefill.append(PrefillRow(position, end, row.start, self._tensor(row.block_table)))
            position = end
        token_ids = self._tensor([token for row in rows for token in row.token_ids])[None]
        vocabularies = self._vocabularies(rows, spans, token_ids)
        adapters = [row.adapters for row in rows]
        ends = [row.start + len(row.token_ids) for row in rows]
        step = StepInputs(
            token_ids=token_ids if vocabularies is None else token_ids.clamp(max=self._model.spec.vocab_size - 1),
            position_ids=self._tensor([p for row in rows for p in range(row.start, row.start + len(row.token_ids))])[
                None
            ],
            cache_positions=self._tensor([p for row in rows for p in self._cache_positions(row)]),
            decode=self._decode_rows(rows[:num_decode]),
            prefill=tuple(prefill),
            logit_positions=self._tensor(logit_positions or [0]),
            lora=passes_of(adapters, [(row.start, end) for row, end in zip(rows, ends, strict=True)], self._device),
            lora_logits=passes_of(
                adapters, [(end - span.end + span.start, end) for span, end in zip(spans, ends, strict=True)], self._device
            ),
            vocabularies=vocabularies,
        )
        return step, spans

    def _vocabularies(
        self, rows: Sequence[Row], spans: Sequence[_LogitSpan], token_ids: Tensor
    ) -> OwnVocabularies | None:
        own = {row.adapters[0].slot.index: size for row in rows if (size := self._vocab_size(row))}
        if not own:
            return None
        base_size = self._model.spec.vocab_size
        sizes = [
            self._vocab_size(row) or base_size
            for row, span in zip(rows, spans, strict=True)
            for _ in range(span.start, span.end)
        ]
        return OwnVocabularies.of(token_ids, own, sizes, base_size, self._device)

    def _cache_positions(self, row: Row) -> list[int]:
        size, table = self._cache.block_size, row.block_table
        return [table[p // size] * size + p % size for p in range(row.start, row.start + len(row.token_ids))]

    def _decode_rows(self, rows: Sequence[Row]) -> DecodeRows:
        width = max((len(row.block_table) for row in rows), default=0)
        table = [[*row.block_table, *[0] * (width - len(row.block_table))] for row in rows]
        return DecodeRows(len(rows), self._tensor(table), self._tensor([row.start + 1 for row in rows]))

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _sample(self, logits: Tensor, sampled: Sequence[tuple[Row, SampleInput, int]]) -> dict[int, RowOutput]:
        """One output per (row, its sampling input, index of its last logits)."""
        if not sampled:
            return {}
        indices = [index for *_, index in sampled]
        own = logits if indices == list(range(len(logits))) else logits[self._tensor(indices)]
        is_number = ~own.amax(dim=-1).isnan()  # amax passes NaN on
        tokens = sample(own, [inputs for _, inputs, _ in sampled])
        wanted = [i for i, (_, inputs, _) in enumerate(sampled) if inputs.params.logprobs is not None]
        logprobs: dict[int, TokenLogprobs] = {}
        if wanted:
            index = self._tensor(wanted)
            num_top = [sampled[i][1].params.logprobs or 0 for i in wanted]
            logprobs = dict(zip(wanted, logprobs_of(own[index], tokens[index], num_top), strict=True))
        return {
            row.sequence_id: RowOutput(row.sequence_id, token, logprobs.get(i))
            if fine
            else RowOutput(
                row.sequence_id, None, error=NumericalError("the model's logits for this request are not numbers")
            )
            for i, ((row, *_), token, fine) in enumerate(zip(sampled, tokens.tolist(), is_number.tolist(), strict=True))
        }


def _prompt_logprobs(logits: Tensor, row: Row, span: _LogitSpan) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of the row's prompt targets, a few positions at a time."""
    targets = row.prompt_targets or ()
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), _LOGPROB_ROWS):
        part = targets[start : start + _LOGPROB_ROWS]
        own = logits[span.start + start : span.start + start + len(part)]
        tokens = torch.tensor(part, dtype=torch.int64, device=logits.device)
        found.extend(logprobs_of(own, tokens, [row.num_prompt_logprobs] * len(part)))
    return tuple(found)


def _with_prompt(output: RowOutput | None, sequence_id: int, found: tuple[TokenLogprobs, ...]) -> RowOutput:
    if output is None:
        return RowOutput(sequence_id, None, prompt_logprobs=found)
    return RowOutput(sequence_id, output.token_id, output.logprobs, found, output.error)
