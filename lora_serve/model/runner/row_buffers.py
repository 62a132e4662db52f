"""The inputs of a step of decode rows, in memory that stays where it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lora_serve.core.batch import BASE_SLOT, Row
from lora_serve.model.step.device_tokens import DeviceTokens
from lora_serve.model.step.step_context import DecodeRows, LoraTokens, StepInputs
from lora_serve.model.system.transfer import to_device

_COLUMNS = 5  # token id, position, place in the cache, keys, slot; then the block table


class RowBuffers:
    """Room for `num_rows` rows of one token whose block tables have `width` blocks.

    One piece of int64, filled in one copy per step: five columns, the block table, and the rows' scales as float32.
    """

    def __init__(self, num_rows: int, width: int, block_size: int, idle_block: int, device: torch.device) -> None:
        """`idle_block`: an unused block, which rows without a sequence write to and read."""
        self.num_rows, self._width = num_rows, width
        self._block_size, self._idle_block = block_size, idle_block
        num_words = num_rows * (_COLUMNS + width) + -(-num_rows // 2)
        self._memory = torch.zeros(num_words, dtype=torch.int64, device=device)
        sizes = [num_rows] * _COLUMNS + [num_rows * width, -(-num_rows // 2)]
        columns = torch.split(self._memory, sizes)
        self._ids, self._positions, self._places, self._lengths, self._slots, table, scales = columns
        self._table = table.view(num_rows, width)
        self._scales = scales.view(torch.float32)[:num_rows]
        self._all_rows = torch.arange(num_rows, device=device)

    def fill(self, rows: Sequence[Row]) -> None:
        """Sets the step's values, idle rows behind them. The copy only joins the queue."""
        size, width, most = self._block_size, self._width, self.num_rows
        columns = np.zeros((_COLUMNS, most), dtype=np.int64)
        columns[2:, :] = np.array([[self._idle_block * size], [1], [BASE_SLOT]])
        table = np.zeros((most, width), dtype=np.int64)
        table[:, 0] = self._idle_block
        scales = np.ones(most + most % 2, dtype=np.float32)
        for i, row in enumerate(rows):
            position, blocks = row.start, row.block_table
            place = blocks[position // size] * size + position % size
            slot = row.adapters[0].slot.index if row.adapters else BASE_SLOT
            columns[:, i] = (row.token_ids[0], position, place, position + 1, slot)
            table[i, : len(blocks)] = blocks
            if row.adapters:
                scales[i] = row.adapters[0].scale
        host = np.concatenate([columns.reshape(-1), table.reshape(-1), scales.view(np.int64)])
        self._memory.copy_(to_device(torch.from_numpy(host), torch.int64, self._memory.device))

    def step(self, *, with_lora: bool) -> StepInputs:
        """A new step over the same memory each time: attention's notes on a step belong to one pass."""
        lora: tuple[LoraTokens, ...] = ()
        if with_lora:
            no_pieces = torch.zeros(0, 3, dtype=torch.int32)
            lora = (LoraTokens((), self.num_rows, no_pieces, None, DeviceTokens.of_rows(self._slots, self._scales)),)
        return StepInputs(
            token_ids=self._ids[None],
            position_ids=self._positions[None],
            cache_positions=self._places,
            decode=DecodeRows(self.num_rows, self._table, self._lengths),
            prefill=(),
            logit_positions=self._all_rows,
            lora=lora,
            lora_logits=lora,
        )
