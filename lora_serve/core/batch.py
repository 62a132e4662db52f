"""One step's work: the batch that the scheduler hands to the runner, the results that come back, and the device memory
that it needs. Plain numbers; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from lora_serve.core.errors import LoraServeError
from lora_serve.core.messages import TokenLogprobs
from lora_serve.core.request import PoolingParams, SamplingParams

BASE_SLOT = -1  # the slot of rows without an adapter


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A device slot as a row sees it; the pool refuses a row whose generation is not the slot's own."""

    index: int
    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class RowAdapter:
    """One adapter of a row: its delta is added `scale` times at positions `start` and later."""

    slot: SlotRef
    scale: float = 1.0
    start: int = 0


class AllowedTokens(Protocol):
    """The tokens that may come next in a row. They are worked out on another thread while the forward pass runs."""

    def wait(self) -> bytes:
        """One bit per token of the row's vocabulary, the lowest bit of the first byte for token 0; tokens beyond its
        end may not come. The same until the row's next token.

        Waits for the thread. Raises LoraServeError if the row cannot go on.
        """


@dataclass(frozen=True, slots=True)
class SampleInput:
    """The sampler's input for a row that reaches its last known token in this step."""

    params: SamplingParams
    seed: int  # 64 bits; drawn by the engine when the request has none
    num_output_tokens: int
    eos_token_ids: tuple[int, ...]  # forbidden while num_output_tokens < min_tokens
    prompt_token_ids: tuple[int, ...] = ()  # filled only for rows with penalties
    output_token_ids: tuple[int, ...] = ()  # filled for these, and for rows with bad words
    allowed: AllowedTokens | None = None  # None: any token may come; asked once the forward pass is under way
    allowed_after: tuple[AllowedTokens, ...] = ()  # with `allowed` and a draft: what may come after each of its tokens

    @property
    def is_plain(self) -> bool:
        """True if the token is a function of logits, temperature, top-k, top-p, min-p and one number alone, and nothing
        is wanted but the token: a graph can draw it.
        """
        params = self.params
        if params.logprobs is not None or params.has_penalties or params.logit_bias or params.allowed_token_ids:
            return False
        return not (params.bad_words or self.allowed is not None or self.num_output_tokens < params.min_tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: `token_ids` are run at positions start, start + 1, ...

    The last `num_draft` of them are guesses: such a row has `sample`, which is for the first position that is not
    decided, and gives one token more than it has guesses that are right. The runner draws a token at each position,
    with the very number that would have been drawn there without a draft, and goes on to the next one as long as the
    token drawn is the one guessed. As a guess has all the probability of its proposal, this is rejection sampling
    (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023): it is accepted with the
    probability that the model gives it, and the tokens, also of a seeded request, are those of a row without a draft.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int  # tokens of this sequence already in the KV cache
    block_table: tuple[int, ...]  # KV blocks covering positions 0 .. start + len(token_ids) - 1; () with `pool`
    adapters: tuple[RowAdapter, ...]  # empty: the base model
    sample: SampleInput | None  # None: a prompt chunk that is not the last
    prompt_targets: tuple[int, ...] | None  # with prompt_logprobs: the next prompt token after each of token_ids
    num_prompt_logprobs: int = 0
    pool: PoolingParams | None = None  # all its tokens are here, and become one vector
    num_draft: int = 0  # of the last token_ids, guesses; fewer than token_ids
    is_long: bool = False  # its positions have the long factors from the first on, see `LongRope`
    is_fed: bool = False  # its only token is the one that the step before draws: token_ids have a 0 in its place
    windowed_table: tuple[int, ...] = ()  # its blocks in the second kind of layers, as many; (): the same numbers

    @property
    def tables(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The blocks of it, by kind of layers."""
        return self.block_table, self.windowed_table or self.block_table

    @property
    def is_plain(self) -> bool:
        """True if the device alone computes its output, of at most one token."""
        if self.prompt_targets is not None or self.pool is not None or self.num_draft:
            return False
        return self.sample is None or self.sample.is_plain

    @property
    def num_sampled(self) -> int:
        """Positions at which a token is drawn."""
        return 0 if self.sample is None else self.num_draft + 1

    @property
    def num_logits(self) -> int:
        """Positions whose logits are wanted."""
        return len(self.prompt_targets) if self.prompt_targets else self.num_sampled

    def without_draft(self) -> Row:
        """The row with none of its guesses."""
        sample = None if self.sample is None else replace(self.sample, allowed_after=())
        end = len(self.token_ids) - self.num_draft
        return replace(self, token_ids=self.token_ids[:end], sample=sample, num_draft=0)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The numbers that decide how long a step takes: the features of `engine/step_cost.py`."""

    num_tokens: int
    num_rows: int
    num_adapters: int  # distinct
    num_kv_read: int  # cached tokens that attention reads, summed over the rows
    num_attended: int = 0  # pairs of a token and one it attends to: quadratic in the length of a prompt
    num_drafted: int = 0  # guesses, which are not among num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens beyond the first of each row that are no guesses: 0 if all rows decode."""
        return max(0, self.num_tokens - self.num_rows)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One KV block on the device and its place in host memory."""

    block: int
    host_block: int
    kind: int = 0  # of layers


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Copies that are due before a step, in this order and once."""

    out: tuple[BlockCopy, ...] = ()  # to host memory
    back: tuple[BlockCopy, ...] = ()  # to the device; the whole block is written

    def __len__(self) -> int:
        return len(self.out) + len(self.back)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass; at least one."""

    rows: tuple[Row, ...]
    fresh_blocks: tuple[int, ...]  # newly assigned, not shared, KV blocks: zeroed before use, so no residue is read
    moves: BlockMoves = BlockMoves()  # before anything else; no block of `back` is fresh
    fresh_windowed: tuple[int, ...] | None = None  # those of the second kind of layers; None: the same numbers

    def first_part(self, rows: tuple[Row, ...]) -> Batch:
        """A batch of these rows, moved already, that zeroes all fresh blocks, as nothing of this one has run."""
        return replace(self, rows=rows, moves=BlockMoves())

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_drafted(self) -> int:
        return sum(row.num_draft for row in self.rows)

    @property
    def num_adapters(self) -> int:
        return len({adapter.slot.digest for row in self.rows for adapter in row.adapters})

    @property
    def load(self) -> StepLoad:
        num_kv_read = sum(row.start + len(row.token_ids) for row in self.rows)
        num_drafted = self.num_drafted
        num_known = self.num_tokens - num_drafted
        return StepLoad(num_known, len(self.rows), self.num_adapters, num_kv_read, self.num_attended, num_drafted)

    @property
    def num_attended(self) -> int:
        """Pairs of a token and one that it attends to, itself included; causal, but all of them with `pool`."""
        counts = [(len(row.token_ids), row) for row in self.rows]
        return sum(n * n if row.pool else n * row.start + n * (n + 1) // 2 for n, row in counts)


@dataclass(frozen=True, slots=True)
class NextToken:
    """One more token of a row with a draft."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowOutput:
    """One row's result; `error` ends this row only."""

    sequence_id: int
    token_id: int | None  # None: nothing was sampled
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one per element of the row's prompt_targets
    error: LoraServeError | None = None
    pooled: bytes | None = None  # of a row with `pool`: float32, little-endian
    following: tuple[NextToken, ...] = ()  # of a row with a draft: each comes after a guess that was right


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """The numbers that decide the size of a step's activations. A row of one token decodes, a longer one is a chunk of
    a prompt.

    Decoding rows are padded to the longest of them, chunks are attended to one after the other.
    """

    num_tokens: int = 0
    num_logits: int = 0  # positions whose logits are wanted
    num_adapters: int = 0  # distinct
    num_decode_rows: int = 0
    longest_decode: int = 0  # keys of the longest decoding row
    longest_chunk: int = 0  # keys of the longest chunk, its own tokens included
    num_scores: int = 0  # tokens * keys of the largest chunk

    @property
    def num_decode_keys(self) -> int:
        return self.num_decode_rows * self.longest_decode

    def plus(self, start: int, count: int, num_logits: int, num_adapters: int | None = None) -> MemoryLoad:
        """The load with one more row of `count` tokens at positions start, start + 1, ...

        `num_adapters`: of all rows then; None: as before.
        """
        keys, is_decode = start + count, count == 1  # made at once, as it is made for every row of every step
        return MemoryLoad(
            self.num_tokens + count,
            self.num_logits + num_logits,
            self.num_adapters if num_adapters is None else num_adapters,
            self.num_decode_rows + is_decode,
            max(self.longest_decode, keys) if is_decode else self.longest_decode,
            self.longest_chunk if is_decode else max(self.longest_chunk, keys),
            self.num_scores if is_decode else max(self.num_scores, count * keys),
        )


def memory_load(rows: Iterable[Row]) -> MemoryLoad:
    """The load of these rows in one step."""
    load, digests = MemoryLoad(), set[str]()
    for row in rows:
        digests.update(adapter.slot.digest for adapter in row.adapters)
        load = load.plus(row.start, len(row.token_ids), row.num_logits)
    return replace(load, num_adapters=len(digests))


@dataclass(frozen=True, slots=True)
class ActivationModel:
    """Bytes of activations at the peak of a step, linear in its load. All zero: not known."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_logit: float = 0.0
    per_adapter: float = 0.0
    per_decode_key: float = 0.0
    per_chunk_key: float = 0.0
    per_score: float = 0.0

    def num_bytes(self, load: MemoryLoad) -> int:
        return int(
            self.fixed
            + self.per_token * load.num_tokens
            + self.per_logit * load.num_logits
            + self.per_adapter * load.num_adapters
            + self.per_decode_key * load.num_decode_keys
            + self.per_chunk_key * load.longest_chunk
            + self.per_score * load.num_scores
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The shares of the device's memory, decided at start. The default knows nothing and allows everything."""

    limit: int | None = None  # bytes for all that is ours; None: not known
    weight_bytes: int = 0
    kv_bytes: int = 0
    adapter_bytes: int | None = None  # of device slots at most; None: no limit but --max-loras
    activations: ActivationModel = field(default_factory=ActivationModel)
    num_host_blocks: int = 0  # KV blocks that fit into host memory
    block_copy_seconds: float = 0.0  # of one KV block to host memory or back, measured at start
    measured_peak: Callable[[], int] = int  # bytes in use at most since start; 0: not measured
    num_windowed_blocks: int = 0  # of the second kind of layers, on the device
    num_windowed_host_blocks: int = 0
