"""A runner without tensors: its tokens are a function of what a row was given, so wrong inputs give wrong tokens.

In place of K and V it keeps, per position, the token and a digest of all that K and V are a function of: the tokens
up to there and the adapters that acted on each of them, the tenant that no cache may cross, and the rope's factors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lora_serve.core.batch import Batch, BlockMoves, NextToken, Row, RowAdapter, RowOutput, SampleInput, SlotRef
from lora_serve.core.errors import DeviceMemoryError, NumericalError
from lora_serve.core.messages import SmokeTestResult, TokenLogprobs
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.core.request import PoolingParams
from tests.engine.fake_constraints import chosen, tokens_in

POISON = 666  # a prompt token that makes its row's logits not a number
EXPLOSION = 667  # a prompt token that makes the whole forward pass raise
_SECOND_KIND = 10**6  # what its blocks, and host blocks, are kept under beyond their numbers


def next_token(digest: object, tokens: list[int]) -> int:
    """The token that adapter `digest` (None: base; a set of (digest, scale) composed) gives after `tokens`."""
    return int.from_bytes(hashlib.sha256(repr((digest, tokens)).encode()).digest()[:2], "big") % 500


def pooled_vector(digest: object, tokens: list[int], type_ids: tuple[int, ...] = ()) -> bytes:
    """The vector that adapter `digest` gives for `tokens`, whatever it shares its batch with."""
    return struct.pack("<2f", next_token(digest, tokens), next_token((digest, type_ids), tokens))


def key_of_uses(used: list[tuple[str, float, int]]) -> object:
    """What `next_token` takes for (digest, scale, start) of each adapter of a row."""
    return None if not used else used[0][0] if len(used) == 1 and used[0][1:] == (1.0, 0) else used


def acting_at(row: Row, position: int) -> list[tuple[str, float]]:
    return sorted((a.slot.digest, a.scale) for a in row.adapters if position >= a.start)


def _state_after(state: str, token: int, row: Row, position: int) -> str:
    return hashlib.sha256(repr((state, token, acting_at(row, position))).encode()).hexdigest()


@dataclass
class FakeRunner:
    """Keeps tokens by block, as a KV cache does, and adapters by slot; checks what a real runner would."""

    block_size: int
    tenants: dict[int, str] = field(default_factory=dict)  # by sequence id
    batches: list[Batch] = field(default_factory=list)
    slots: dict[int, tuple[SlotRef, str]] = field(default_factory=dict)
    cache: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)  # token, digest of its K and V
    host: dict[int, dict[int, tuple[int, str]]] = field(default_factory=dict)  # host block -> offset, as in `cache`
    max_tokens: int | None = None  # more than these in one batch, and it is out of memory
    num_tokens_run: int = 0
    rejected: set[tuple[int, int]] = field(default_factory=set)  # places that hold the K and V of wrong guesses
    num_accepted: int = 0  # guesses that were right
    next_token: Callable[[object, list[int]], int] = field(default=next_token)
    long_rope: LongRope = ONE_ROPE
    # Of each kind of layers, tokens that one sees, itself included; at least 2, as the last K and V tell of all before.
    windows: tuple[int | None, ...] = (None,)
    histories: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the tokens up to each K and V, by digest

    def load_slot(self, slot: SlotRef, adapter: str) -> None:
        self.slots[slot.index] = (slot, adapter)

    def clear_slot(self, index: int) -> None:
        self.slots.pop(index, None)

    def run(self, batch: Batch) -> list[RowOutput]:
        self.batches.append(batch)
        fresh = {(block, 0) for block in batch.fresh_blocks} | {(block, 1) for block in batch.fresh_windowed or ()}
        assert not {(copy.block, copy.kind) for copy in batch.moves.back} & fresh, "zeroed after it was filled"
        if len(batch.rows) > 1 and any(EXPLOSION in row.token_ids for row in batch.rows):
            raise RuntimeError("out of memory, say")
        self.zero(batch.fresh_blocks)
        self.zero(_SECOND_KIND + block for block in batch.fresh_windowed or ())
        if self.max_tokens is not None and batch.num_tokens > self.max_tokens:
            raise DeviceMemoryError("the device has no memory")  # after the blocks were zeroed, as a real one may
        return [self._row(row) for row in batch.rows]

    def zero(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            for offset in range(self.block_size):
                self.cache.pop((block, offset), None)
                self.rejected.discard((block, offset))

    def move_blocks(self, moves: BlockMoves) -> None:
        for copy in moves.out:
            block = copy.block + copy.kind * _SECOND_KIND
            self.host[copy.host_block + copy.kind * _SECOND_KIND] = {
                offset: self.cache[block, offset]
                for offset in range(self.block_size)
                if (block, offset) in self.cache and (block, offset) not in self.rejected
            }
        for copy in moves.back:
            block = copy.block + copy.kind * _SECOND_KIND
            for offset in range(self.block_size):
                self.cache.pop((block, offset), None)
                self.rejected.discard((block, offset))
            for offset, content in self.host.pop(copy.host_block + copy.kind * _SECOND_KIND).items():
                self.cache[block, offset] = content

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        slot, digest = self.slots[adapter.slot.index]
        assert slot == adapter.slot
        return SmokeTestResult(0.0 if digest.endswith("noop") else 1.0, 0.0, 1.0)

    def _row(self, row: Row) -> RowOutput:
        for adapter in row.adapters:
            slot, digest = self.slots[adapter.slot.index]
            assert slot == adapter.slot, "the row's slot was given to another adapter"
            assert digest == adapter.slot.digest
        used = sorted((a.slot.digest, a.scale, a.start) for a in row.adapters)
        if row.pool is not None:
            return self._pooled(row, key_of_uses(used), row.pool)
        history = self._write_and_read(row)
        prompt = tuple(TokenLogprobs(token, 0.0, 1, ()) for token in row.prompt_targets or ())
        if row.sample is None:
            return RowOutput(row.sequence_id, None, prompt_logprobs=prompt)
        if POISON in history:
            return RowOutput(row.sequence_id, None, error=NumericalError("not a number"))
        if EXPLOSION in history:
            raise RuntimeError("this row fails alone, too")
        first, *following = self._sampled(row, row.sample, key_of_uses(used), history)
        self.num_accepted += len(following)
        last = row.start + len(row.token_ids)
        for kind in range(len(self.windows)):
            wrong = range(last - row.num_draft + len(following), last)
            self.rejected.update(self.place(row, position, kind) for position in wrong)
        return RowOutput(
            row.sequence_id, first, prompt_logprobs=prompt, following=tuple(NextToken(token) for token in following)
        )

    def _sampled(self, row: Row, sample: SampleInput, key: object, history: list[int]) -> list[int]:
        """The token at the first position that is not decided, and behind each guess that is right."""
        num_known = len(history) - row.num_draft
        found: list[int] = []
        lengths = range(num_known, num_known + row.num_draft + 1)
        is_long = {length > self.long_rope.boundary for length in lengths}
        assert not self.long_rope.recomputes or is_long == {row.is_long}, "a token is drawn by the other factors"
        masks = () if sample.allowed is None else (sample.allowed, *sample.allowed_after)
        assert not masks or len(masks) == row.num_draft + 1
        while not found or (len(found) <= row.num_draft and found[-1] == history[num_known + len(found) - 1]):
            token = self.next_token(key, history[: num_known + len(found)])
            found.append(token if not masks else chosen(token, tokens_in(masks[len(found)].wait())))
        return found

    def _pooled(self, row: Row, key: object, pool: PoolingParams) -> RowOutput:
        assert (row.start, row.block_table, row.sample, row.prompt_targets) == (0, (), None, None)
        self.num_tokens_run += len(row.token_ids)
        if POISON in row.token_ids:
            return RowOutput(row.sequence_id, None, error=NumericalError("not a number"))
        if EXPLOSION in row.token_ids:
            raise RuntimeError("this row fails alone, too")
        return RowOutput(row.sequence_id, None, pooled=pooled_vector(key, list(row.token_ids), pool.token_type_ids))

    def _write_and_read(self, row: Row) -> list[int]:
        """Every token of the row so far; what it reads must be what it would have written itself."""
        first = self._first_seen(row, 0)
        history = [*self.histories[self.cache[self.place(row, row.start - 1)][1]][:first]] if first else []
        state = repr((self.tenants.get(row.sequence_id, "default"), row.is_long))
        for position, token in enumerate(history):
            state = _state_after(state, token, row, position)
        contents = {}
        for position in range(first, row.start + len(row.token_ids)):
            is_new = position >= row.start
            token = row.token_ids[position - row.start] if is_new else self.cache[self.place(row, position)][0]
            state = _state_after(state, token, row, position)
            contents[position] = token, state
            history.append(token)
            if self.windows[0] is not None:
                self.histories[state] = tuple(history)
        for kind in range(len(self.windows)):
            for position in range(self._first_seen(row, kind), row.start + len(row.token_ids)):
                self._write_or_read(self.place(row, position, kind), contents[position], is_new=position >= row.start)
        self.num_tokens_run += len(row.token_ids)
        return history

    def _write_or_read(self, place: tuple[int, int], content: tuple[int, str], *, is_new: bool) -> None:
        if is_new:
            assert place not in self.cache or place in self.rejected, (
                "a block that was not given to this row as a fresh one is written"
            )
            self.cache[place] = content
            self.rejected.discard(place)
        assert place not in self.rejected, "the row reads what a guess that was wrong left behind"
        assert self.cache[place] == content, "the row reads what another sequence, tenant or adapter wrote"

    def _first_seen(self, row: Row, kind: int) -> int:
        window = self.windows[kind]
        return 0 if window is None else max(0, row.start + 1 - window)

    def place(self, row: Row, position: int, kind: int = 0) -> tuple[int, int]:
        block = row.tables[kind][position // self.block_size]
        assert block, "a block that was given back is read"
        return block + kind * _SECOND_KIND, position % self.block_size
