"""Runs one batch: rows to packed tensors, one forward pass, logits to one token per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import torch
from torch import Tensor

from lora_serve.core.batch import Batch, BlockMoves, NextToken, Row, RowAdapter, RowOutput, SampleInput, SlotRef
from lora_serve.core.errors import InternalError, InvalidRequestError, LoraServeError, NumericalError
from lora_serve.core.messages import SmokeTestResult, TokenLogprobs
from lora_serve.model.base_model import BaseModel
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.runner.draw_graphs import DrawnTokens
from lora_serve.model.runner.graphs import LaunchedStep, StepGraphs
from lora_serve.model.runner.packing import LogitSpan, StepPacker
from lora_serve.model.runner.sampler import SampledToken, choose, is_cheap, logprobs_of
from lora_serve.model.system.device_memory import copy_to_host, to_device, within_memory
from lora_serve.model.system.threads import TeamWaits

_LOGPROB_ROWS = 64  # positions whose full log-softmax is held at once


def draw_rows(logits: Tensor, rows: Sequence[tuple[Row, int]], *, all_at_once: bool) -> dict[int, RowOutput]:
    """One output by id for each row that samples, given with the index of its first position's logits.

    `all_at_once`: the device is waited for once. Else a row whose tokens take more than a look at the logits has a
    position drawn when the guess before it is known to be right: all else would be work for nothing.
    """
    left = drawn = [_DrawnRow(row, first) for row, first in rows]
    while left:
        positions = [one.positions(all_at_once=all_at_once) for one in left]
        indices = [one.first + i for one, own in zip(left, positions, strict=True) for i in own]
        inputs = [sample_input(one.row, i) for one, own in zip(left, positions, strict=True) for i in own]
        are_all = indices == list(range(len(logits)))
        choices = iter(choose(logits if are_all else logits[to_device(indices, torch.int64, logits.device)], inputs))
        for one, own in zip(left, positions, strict=True):
            one.take(list(islice(choices, len(own))))
        left = [one for one in left if not one.is_done]
    return {one.row.sequence_id: one.output() for one in drawn}


def draw_step(step: LaunchedStep, rows: Sequence[tuple[Row, int]], *, all_at_once: bool) -> dict[int, RowOutput]:
    """As `draw_rows`, with the tokens that a graph has drawn: the host draws those of the other rows meanwhile."""
    if step.drawn is None:
        return draw_rows(step.logits, rows, all_at_once=all_at_once)
    by_graph = {row.sequence_id for row, _ in step.drawn.rows}
    others = [(row, first) for row, first in rows if row.sequence_id not in by_graph]
    outputs = draw_rows(step.logits, others, all_at_once=all_at_once)
    tokens = step.drawn.wait()
    for row, span in step.drawn.rows:
        if (found := tokens.get(row.sequence_id)) is not None:
            drawn = _DrawnRow(row, span.start)
            drawn.take(found)
            outputs[row.sequence_id] = drawn.output()
    left = [(row, first) for row, first in rows if row.sequence_id not in outputs]
    return outputs | draw_rows(step.logits, left, all_at_once=all_at_once)


@dataclass(slots=True)
class _DrawnRow:
    """A row whose tokens are being drawn, and those that it has of this step."""

    row: Row
    first: int  # the index of its first position's logits among all of the step
    choices: list[SampledToken] = field(default_factory=list)
    is_done: bool = False  # the last choice decides no further position

    def positions(self, *, all_at_once: bool) -> range:
        """The positions to draw next, 0 for the first."""
        num_done = len(self.choices)
        end = self.row.num_sampled if all_at_once or is_cheap(sample_input(self.row, 0)) else num_done + 1
        return range(num_done, end)

    def take(self, choices: Sequence[SampledToken]) -> None:
        """Takes in what was drawn at `positions`, up to the first that is not the guess.

        A position after the first that cannot be used is left to the next step, where it is the first.
        """
        draft = self.row.token_ids[len(self.row.token_ids) - self.row.num_draft :]
        for choice in choices:
            if self.choices and not choice.is_usable:
                break
            self.choices.append(choice)
            num_drawn = len(self.choices)
            if not choice.is_usable or num_drawn > len(draft) or choice.token_id != draft[num_drawn - 1]:
                break
        else:
            return
        self.is_done = True

    def output(self) -> RowOutput:
        """The row's output, once it is done."""
        choice, *following = self.choices
        if choice.error is not None:
            return RowOutput(self.row.sequence_id, None, error=choice.error)
        if not choice.is_number:
            return without_numbers(self.row.sequence_id)
        return RowOutput(
            self.row.sequence_id,
            choice.token_id,
            choice.logprobs,
            following=tuple(NextToken(later.token_id, later.logprobs) for later in following),
        )


@dataclass(frozen=True, slots=True)
class StepFlight:
    """Implements `engine.Flight`: a replayed step whose rows are plain."""

    rows: tuple[Row, ...]
    places: dict[int, int]  # of the rows' tokens among all that the step draws, by id
    drawn: DrawnTokens

    def collect(self) -> list[RowOutput | None]:
        tokens = self.drawn.wait()
        return [self._output(row, tokens.get(row.sequence_id)) for row in self.rows]

    def _output(self, row: Row, tokens: list[SampledToken] | None) -> RowOutput | None:
        if row.sample is None:
            return RowOutput(row.sequence_id, None)
        return None if tokens is None else _DrawnRow(row, 0, tokens).output()


def without_numbers(sequence_id: int) -> RowOutput:
    """The output of a row whose logits mean nothing."""
    return RowOutput(sequence_id, None, error=NumericalError("the model's logits for this request are not numbers"))


def sample_input(row: Row, position: int) -> SampleInput:
    """The sampler's input of a row that samples, after the first `position` guesses of its draft."""
    sample = row.sample
    assert sample is not None
    if position == 0 or _counts_nothing(sample):
        return sample
    wants_output = sample.params.has_penalties or bool(sample.params.bad_words)
    end = len(row.token_ids) - row.num_draft + position
    return replace(
        sample,
        num_output_tokens=sample.num_output_tokens + position,
        output_token_ids=sample.output_token_ids + row.token_ids[end - position : end] if wants_output else (),
        allowed=None if sample.allowed is None else sample.allowed_after[position - 1],
    )


def _counts_nothing(sample: SampleInput) -> bool:
    """True if the tokens before a position change nothing but the logits."""
    params = sample.params
    return is_cheap(sample) and not (params.bad_words or params.min_tokens or sample.allowed)


class AdapterRunner:
    """The part of `engine.Runner` that models share which generate and which pool: slots, and rows that are refused."""

    def __init__(self, slots: LoraSlots) -> None:
        self._slots = slots

    def load_slot(self, slot: SlotRef, adapter: HostAdapter) -> None:
        self._slots.load(slot, adapter)

    def clear_slot(self, index: int) -> None:
        self._slots.clear(index)

    def _outputs(self, batch: Batch, run: Callable[[list[Row]], dict[int, RowOutput]]) -> list[RowOutput]:
        """The outputs of a batch in its order; `run` works out those of the rows that are not refused."""
        refused = {row.sequence_id: error for row in batch.rows if (error := self._refusal(row)) is not None}
        outputs = {row_id: RowOutput(row_id, None, error=error) for row_id, error in refused.items()}
        if rows := [row for row in batch.rows if row.sequence_id not in refused]:
            outputs.update(run(rows))
        return [outputs[row.sequence_id] for row in batch.rows]

    def _refusal(self, row: Row) -> LoraServeError | None:
        try:
            for adapter in row.adapters:
                self._slots.check(adapter.slot)
        except InternalError as error:
            return error
        return None


def effect(base: Tensor, changed: Tensor, again: Tensor) -> SmokeTestResult:
    """The greatest differences of an adapter's numbers, and of the base model's own when they are worked out again."""
    return SmokeTestResult(
        (changed - base).abs().max().item(), (again - base).abs().max().item(), base.abs().max().item()
    )


class ModelRunner(AdapterRunner):
    """Implements `engine.Runner` for models that generate; knows slots, blocks and rows, but no requests and no
    tenants.
    """

    def __init__(
        self,
        model: BaseModel,
        cache: KVCache,
        slots: LoraSlots,
        device: torch.device,
        graphs: StepGraphs | None = None,
        waits: TeamWaits | None = None,
    ) -> None:
        """`graphs`: for batches that they can replay; None: no batch is replayed. `waits`: looks after each batch."""
        super().__init__(slots)
        self._model = model
        self._cache = cache
        self._device = device
        self._graphs = graphs
        self._waits = waits
        self._packer = StepPacker(cache, slots, model.spec.vocab_size, device)

    def run(self, batch: Batch) -> list[RowOutput]:
        outputs = within_memory(self._device, lambda: self._run(batch))
        if self._waits is not None:
            self._waits.after_step()
        return outputs

    def launch(self, batch: Batch, before: StepFlight | None) -> StepFlight | None:
        """Implements `engine.Launcher`."""
        if self._graphs is None or any(self._refusal(row) is not None for row in batch.rows):
            return None
        return within_memory(self._device, lambda: self._replay(batch, {} if before is None else before.places))

    @torch.inference_mode()
    def _replay(self, batch: Batch, places: Mapping[int, int]) -> StepFlight | None:
        assert self._graphs is not None
        rows = sorted(batch.rows, key=lambda row: len(row.token_ids) > 1)
        self._cache.zero(batch.fresh_blocks, batch.fresh_windowed)
        step = self._graphs.launch(rows, places, is_ahead=True)
        if step is None or (step.drawn is None and any(row.sample for row in rows)):
            return None
        drawn = step.drawn or DrawnTokens([], copy_to_host(step.logits.new_empty(3, 0)))  # waits for the step
        found = {row.sequence_id: span.start for row, span in zip(rows, step.spans, strict=True)}
        return StepFlight(batch.rows, found, drawn)

    def move_blocks(self, moves: BlockMoves) -> None:
        self._cache.move(moves)

    def _run(self, batch: Batch) -> list[RowOutput]:
        self._cache.zero(batch.fresh_blocks, batch.fresh_windowed)
        return self._outputs(batch, self._run_rows)

    def _run_rows(self, rows: list[Row]) -> dict[int, RowOutput]:
        outputs = self._run_together(rows)
        if spoiled := [row.without_draft() for row in rows if row.num_draft and not _is_fine(outputs[row.sequence_id])]:
            outputs.update(self._run_together(spoiled))
        return outputs

    @torch.inference_mode()
    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        """Runs the prompt as three rows of one batch: base, adapter, base again. Uses the cache's spare blocks."""
        self._slots.check(adapter.slot)
        tables, windowed = (self._cache.spare_blocks(3, len(token_ids), kind) for kind in range(2))
        rows = [
            Row(i, token_ids, 0, table, adapters, None, token_ids, windowed_table=other)
            for i, (table, other, adapters) in enumerate(zip(tables, windowed, ((), (adapter,), ()), strict=True))
        ]
        self._cache.zero([*chain(*tables)], [*chain(*windowed)])
        step, _ = self._packer.pack(rows)
        size = self._model.spec.vocab_size
        known = min(self._slots.vocab_size(adapter.slot.index) or size, size)  # tokens that both know
        logits = within_memory(self._device, lambda: self._model.logits(step))[:, :known]
        return effect(*logits.reshape(3, len(token_ids), -1))

    def _refusal(self, row: Row) -> LoraServeError | None:
        if (error := super()._refusal(row)) is not None:
            return error
        # On a GPU an id beyond the table disables it for the whole process; requests are checked for the base's only.
        size = self._packer.vocab_size(row) or self._model.spec.vocab_size
        if max(row.token_ids) >= size or min(row.token_ids) < 0:
            return InvalidRequestError(f"The token ids must be below {size}, the vocabulary's size.", param="prompt")
        return None

    @torch.inference_mode()
    def _run_together(self, rows: list[Row]) -> dict[int, RowOutput]:
        rows.sort(key=lambda row: len(row.token_ids) > 1)
        step = self._launch(rows)
        spanned = list(zip(rows, step.spans, strict=True))
        prompt_logprobs = {row.sequence_id: _prompt_logprobs(step.logits, row, span) for row, span in spanned}
        sampling = [(row, span.end - row.num_sampled) for row, span in spanned if row.sample]
        # only where waiting costs something is a position drawn before it is known to count
        chosen = draw_step(step, sampling, all_at_once=self._device.type != "cpu")
        return {
            row.sequence_id: chosen.get(row.sequence_id, RowOutput(row.sequence_id, None))
            if not prompt_logprobs[row.sequence_id]
            else _with_prompt(chosen.get(row.sequence_id), row.sequence_id, prompt_logprobs[row.sequence_id])
            for row in rows
        }

    def _launch(self, rows: Sequence[Row]) -> LaunchedStep:
        if self._graphs is not None and (found := self._graphs.launch(rows)) is not None:
            return found
        step, spans = self._packer.pack(rows)
        return LaunchedStep(self._model.logits(step), spans)


def _is_fine(output: RowOutput) -> bool:
    """False if a guess may have spoiled the row: what weighs nothing is no number all the same if it is none itself."""
    return not isinstance(output.error, NumericalError)


def _prompt_logprobs(logits: Tensor, row: Row, span: LogitSpan) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of the row's prompt targets, a few positions at a time."""
    targets = row.prompt_targets or ()
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), _LOGPROB_ROWS):
        part = targets[start : start + _LOGPROB_ROWS]
        own = logits[span.start + start : span.start + start + len(part)]
        tokens = to_device(part, torch.int64, logits.device)
        found.extend(logprobs_of(own, tokens, [row.num_prompt_logprobs] * len(part)))
    return tuple(found)


def _with_prompt(output: RowOutput | None, sequence_id: int, found: tuple[TokenLogprobs, ...]) -> RowOutput:
    if any(math.isnan(logprobs.logprob) for logprobs in found):
        return without_numbers(sequence_id)
    if output is None:
        return RowOutput(sequence_id, None, prompt_logprobs=found)
    return replace(output, prompt_logprobs=found)
