"""A runner without tensors: its tokens are a function of what a row was given, so wrong inputs give wrong tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from lora_serve.core.batch import Batch, Row, RowAdapter, RowOutput, SlotRef
from lora_serve.core.commands import ProbeResult
from lora_serve.core.errors import NumericalError

POISON = 666  # a prompt token that makes its row's logits not a number
EXPLOSION = 667  # a prompt token that makes the whole forward pass raise


def next_token(digest: object, tokens: list[int]) -> int:
    """The token that adapter `digest` (None: base; a set of (digest, scale) composed) gives after `tokens`."""
    return int.from_bytes(hashlib.sha256(repr((digest, tokens)).encode()).digest()[:2], "big") % 500


@dataclass
class FakeRunner:
    """Keeps tokens by block, as a KV cache does, and adapters by slot; checks what a real runner would."""

    block_size: int
    batches: list[Batch] = field(default_factory=list)
    slots: dict[int, tuple[SlotRef, str]] = field(default_factory=dict)
    cache: dict[tuple[int, int], int] = field(default_factory=dict)

    def load_slot(self, slot: SlotRef, adapter: str) -> None:
        self.slots[slot.index] = (slot, adapter)

    def clear_slot(self, index: int) -> None:
        self.slots.pop(index, None)

    def run(self, batch: Batch) -> list[RowOutput]:
        self.batches.append(batch)
        if len(batch.rows) > 1 and any(EXPLOSION in row.token_ids for row in batch.rows):
            raise RuntimeError("out of memory, say")
        for block in batch.fresh_blocks:
            for offset in range(self.block_size):
                self.cache.pop((block, offset), None)
        return [self._row(row) for row in batch.rows]

    def probe(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> ProbeResult:
        slot, digest = self.slots[adapter.slot.index]
        assert slot == adapter.slot
        return ProbeResult(0.0 if digest.endswith("noop") else 1.0, 0.0, 1.0)

    def _row(self, row: Row) -> RowOutput:
        for position, token in enumerate(row.token_ids, start=row.start):
            self.cache[self._place(row, position)] = token
        history = [self.cache[self._place(row, p)] for p in range(row.start + len(row.token_ids))]
        for adapter in row.adapters:
            slot, digest = self.slots[adapter.slot.index]
            assert slot == adapter.slot, "the row's slot was given to another adapter"
            assert digest == adapter.slot.digest
        used = sorted((adapter.slot.digest, adapter.scale) for adapter in row.adapters)
        key = None if not used else used[0][0] if len(used) == 1 and used[0][1] == 1.0 else used
        if row.sample is None:
            return RowOutput(row.sequence_id, None)
        if POISON in history:
            return RowOutput(row.sequence_id, None, error=NumericalError("not a number"))
        if EXPLOSION in history:
            raise RuntimeError("this row fails alone, too")
        return RowOutput(row.sequence_id, next_token(key, history))

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size], position % self.block_size
