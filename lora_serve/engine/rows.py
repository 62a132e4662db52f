"""A sequence's next share of a step, as the runner wants it. Pure functions; nothing is decided here."""

from __future__ import annotations

from lora_serve.core.batch import Row, RowAdapter, SampleInput
from lora_serve.engine.sequence import Sequence

_PROMPT_LOGPROB_CHUNK = 128  # tokens per step of a row that wants logits of every position: bounds their memory


def chunk_of(sequence: Sequence, budget: int) -> int:
    """How many of its known tokens the sequence runs next, `budget` at most; all of them if they are to be pooled."""
    if sequence.is_pooling:
        return sequence.num_remaining
    limit = min(budget, _PROMPT_LOGPROB_CHUNK) if wants_prompt_logprobs(sequence) else budget
    return min(sequence.num_remaining, limit)


def row_of(sequence: Sequence, count: int, eos_token_ids: tuple[int, ...]) -> Row:
    """The next `count` tokens as a row; it samples if they are the last that are known."""
    start = sequence.num_computed
    end = start + count
    pool = sequence.request.pooling
    wants_targets = wants_prompt_logprobs(sequence) and start < sequence.num_prompt
    return Row(
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_table=tuple(sequence.blocks),
        adapters=tuple(
            RowAdapter(slot, use.scale, use.start) for slot, use in zip(sequence.slots, sequence.adapters, strict=True)
        ),
        sample=_sample_input(sequence, eos_token_ids) if end == len(sequence.token_ids) and pool is None else None,
        prompt_targets=tuple(sequence.token_ids[start + 1 : end + 1]) if wants_targets else None,
        num_prompt_logprobs=sequence.request.sampling.prompt_logprobs or 0,
        pool=pool,
    )


def wants_prompt_logprobs(sequence: Sequence) -> bool:
    """Only before the first token: after a preemption they are known already."""
    return sequence.request.sampling.prompt_logprobs is not None and sequence.num_output == 0


def _sample_input(sequence: Sequence, eos_token_ids: tuple[int, ...]) -> SampleInput:
    params = sequence.request.sampling
    return SampleInput(
        params,
        sequence.seed,
        sequence.num_output,
        eos_token_ids,
        sequence.request.prompt_token_ids if params.has_penalties else (),
        tuple(sequence.token_ids[sequence.num_prompt :]) if params.has_penalties else (),
    )
