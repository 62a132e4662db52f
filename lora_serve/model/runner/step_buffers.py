"""The inputs of captured steps: buffers that keep their place, filled anew before each replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.core.batch import BASE_SLOT, Row
from lora_serve.model.runner.draw_graphs import NUM_COLUMNS, PlannedDraws, plan_draws
from lora_serve.model.runner.packing import LogitSpan
from lora_serve.model.step_context import (
    QUERY_TILE,
    TILE_TOKENS,
    DecodeRows,
    DeviceTokens,
    LoraTokens,
    StepInputs,
    TiledRows,
    pieces_of,
    segments_of,
    short_and_tiles,
)
from lora_serve.model.system.device_memory import to_device

TOKENS_PER_ROW = 8  # a captured step with so many tokens has room for one row of several
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes that a graph was captured for."""

    num_rows: int  # of one token
    num_long_tokens: int  # of rows of several: prompts' chunks, and drafts; 0: there is none
    width: int  # blocks of the longest row
    with_lora: bool

    @property
    def num_long_rows(self) -> int:
        return self.num_long_tokens // TOKENS_PER_ROW

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_long_tokens

    @property
    def num_logits(self) -> int:
        return self.num_rows + self.num_long_rows

    def sizes(self) -> dict[str, int]:
        """The 64-bit words of each buffer; those of scales hold two numbers each."""
        tokens, logits = self.num_tokens, self.num_logits
        lora_tiles = 2 * self.num_long_tokens // TILE_TOKENS  # of segments that are longer than one
        return {
            "ids": tokens, "positions": tokens, "places": tokens, "slots": tokens, "is_long": tokens,
            "lengths": self.num_rows, "fed": self.num_rows, "logit_positions": logits, "logit_slots": logits,
            "table": (self.num_rows + self.num_long_rows) * self.width,
            "tiles": 4 * (self.num_long_tokens // QUERY_TILE + self.num_long_rows), "lora_tiles": 3 * lora_tiles,
            "scales": -(-tokens // 2), "logit_scales": -(-logits // 2), "lora_tile_scales": -(-lora_tiles // 2),
            "draws": NUM_COLUMNS * logits,
        }  # fmt: skip


class _HostTable:
    """The blocks of rows in layers of one kind, and the places of tokens there."""

    def __init__(self, kind: int, idle_block: int, shape: GraphShape, parts: Mapping[str, Any]) -> None:
        self.kind, self.idle_block, self._num_rows = kind, idle_block, shape.num_rows
        self.places: _Numbers = parts[_of_kind("places", kind)]
        self.blocks: _Numbers = parts[_of_kind("table", kind)].reshape(-1, shape.width)
        self._known: list[tuple[int, ...]] = [()] * len(self.blocks)  # the blocks that it holds, by row

    def fill(self, rows: Sequence[Row], num_short: int) -> None:
        """Writes what is new since the last step: in most rows a block now and then. Behind them are zeros."""
        wanted: list[tuple[int, ...]] = [(self.idle_block,)] * len(self._known)
        wanted[:num_short] = [row.tables[self.kind] for row in rows[:num_short]]
        first_long = self._num_rows
        wanted[first_long : first_long + len(rows) - num_short] = [row.tables[self.kind] for row in rows[num_short:]]
        for i, (blocks, known) in enumerate(zip(wanted, self._known, strict=True)):
            same = len(known) if blocks[: len(known)] == known else 0
            self.blocks[i, same : len(blocks)] = blocks[same:]
            self.blocks[i, len(blocks) : len(known)] = 0
        self._known = wanted


def _of_kind(name: str, kind: int) -> str:
    return f"{name} {kind}" if kind else name


class StepBuffers:
    """The inputs of steps of one shape: one piece of memory, filled in one copy per step.

    Rows of one token come first, then the tokens of longer rows. What a step does not fill is idle: such tokens write
    to an unused block and read no adapter, and nothing of them is looked at.
    """

    def __init__(self, shape: GraphShape, block_size: int, idle_blocks: Sequence[int], device: torch.device) -> None:
        """`idle_blocks`: of each kind of layers an unused block, which idle rows write to and read."""
        self.shape = shape
        self._block_size = block_size
        sizes, others = shape.sizes(), range(1, len(idle_blocks))
        self._sizes = sizes | {_of_kind(name, kind): sizes[name] for kind in others for name in ("places", "table")}
        self._memory = torch.zeros(sum(self._sizes.values()), dtype=torch.int64, device=device)
        self._parts = dict(zip(self._sizes, torch.split(self._memory, list(self._sizes.values())), strict=True))
        self._host = np.zeros(len(self._memory), dtype=np.int64)
        ends = np.cumsum(list(self._sizes.values()))[:-1]
        self._host_parts: dict[str, Any] = dict(zip(self._sizes, np.split(self._host, ends), strict=True))
        for name in ("scales", "logit_scales", "lora_tile_scales"):
            self._host_parts[name] = self._host_parts[name].view(np.float32)
        self._tables = [_HostTable(kind, idle, shape, self._host_parts) for kind, idle in enumerate(idle_blocks)]

    def fill(
        self, rows: Sequence[Row], places: Mapping[int, int] = MappingProxyType({})
    ) -> tuple[list[LogitSpan], PlannedDraws]:
        """Sets the step's values; rows of one token come first. The copy only joins the queue. Returns where each row's
        logits lie, one after the other, and which rows' tokens a graph can draw. `places`: by the ids of rows that are
        fed, their places among the tokens of the step before.
        """
        parts = self._host_parts
        for name, part in parts.items():
            if not name.startswith("table"):
                part[:] = 1.0 if name.endswith("scales") else 0
        parts["slots"][:] = parts["logit_slots"][:] = BASE_SLOT
        parts["lengths"][:] = 1
        parts["fed"][:] = -1
        num_short = sum(len(row.token_ids) == 1 for row in rows)
        for table in self._tables:
            table.places[:] = table.idle_block * self._block_size
            table.fill(rows, num_short)
        for i, row in enumerate(rows[:num_short]):
            self._fill_short(parts, i, row)
            if row.is_fed:
                parts["fed"][i] = places[row.sequence_id]
        spans = [LogitSpan(i, i + 1) for i in range(num_short)]
        spans += self._fill_long(parts, rows[num_short:], num_short)
        planned = plan_draws(rows, spans, parts["draws"].view(np.float64).reshape(NUM_COLUMNS, -1))
        self._memory.copy_(to_device(torch.from_numpy(self._host), torch.int64, self._memory.device))
        return spans, planned

    def _fill_short(self, parts: Mapping[str, Any], i: int, row: Row) -> None:
        position = row.start
        parts["ids"][i], parts["positions"][i], parts["is_long"][i] = row.token_ids[0], position, row.is_long
        block, offset = divmod(position, self._block_size)
        for table in self._tables:
            table.places[i] = row.tables[table.kind][block] * self._block_size + offset
        parts["lengths"][i], parts["logit_positions"][i] = position + 1, i
        for slots, scales in (("slots", "scales"), ("logit_slots", "logit_scales")):
            _put_adapter(row, position, parts[slots], parts[scales], i)

    def _fill_long(self, parts: Mapping[str, Any], rows: Sequence[Row], logit: int) -> Iterator[LogitSpan]:
        """`logit`: the place of the first row's logits."""
        size, token = self._block_size, self.shape.num_rows
        tiles: list[tuple[int, int, int, int]] = []
        for i, row in enumerate(rows, self.shape.num_rows):
            count = len(row.token_ids)
            here, positions = slice(token, token + count), np.arange(row.start, row.start + count)
            parts["ids"][here], parts["positions"][here], parts["is_long"][here] = row.token_ids, positions, row.is_long
            for table in self._tables:
                table.places[here] = table.blocks[i, positions // size] * size + positions % size
            tiles += [
                (token + first, min(QUERY_TILE, count - first), row.start + first, i)
                for first in range(0, count, QUERY_TILE)
            ]
            end = logit + row.num_sampled
            first = token + count - row.num_sampled
            parts["logit_positions"][logit:end] = range(first, token + count)
            for place in range(logit, end):
                position = row.start + count - end + place
                _put_adapter(row, position, parts["logit_slots"], parts["logit_scales"], place)
            yield LogitSpan(logit, end)
            token, logit = token + count, end
        parts["tiles"][: 4 * len(tiles)] = np.array(tiles, dtype=np.int64).reshape(-1)
        self._fill_lora(parts, rows)

    def _fill_lora(self, parts: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """The slots of the tokens of rows of several, long segments as tiles."""
        pieces = [(self.shape.num_rows, BASE_SLOT, 1.0)]
        for row in rows:
            adapter = row.adapters[0] if row.adapters else None
            pieces += pieces_of(adapter, row.start, row.start + len(row.token_ids))
        short, tiles, scales = short_and_tiles(segments_of(pieces)[0])
        for segment in short:
            parts["slots"][segment.start : segment.end] = segment.slot
            parts["scales"][segment.start : segment.end] = segment.scale
        parts["lora_tiles"][: 3 * len(tiles)] = np.array(tiles, dtype=np.int64).reshape(-1)
        parts["lora_tile_scales"][: len(tiles)] = scales

    def feed(self, tokens: Tensor) -> None:
        """Puts those of the `tokens` [positions] that the step before drew in the places of rows that are fed."""
        fed, ids = self._parts["fed"], self._parts["ids"][: self.shape.num_rows]
        ids.copy_(torch.where(fed < 0, ids, tokens[fed.clamp(min=0)]))

    @property
    def draws(self) -> Tensor:
        """[6, num_logits] float64: what is drawn at each position, see `DrawColumns`."""
        return self._parts["draws"].view(torch.float64).view(NUM_COLUMNS, -1)

    def step(self) -> StepInputs:
        """A new step over the same memory each time: attention's notes on a step belong to one pass."""
        shape, parts = self.shape, self._parts
        lora: tuple[LoraTokens, ...] = ()
        lora_logits: tuple[LoraTokens, ...] = ()
        if shape.with_lora:
            scales = {name: parts[name].view(torch.float32) for name in parts if name.endswith("scales")}
            lora = _on_device(
                DeviceTokens(
                    parts["slots"], scales["scales"], parts["lora_tiles"].view(-1, 3), scales["lora_tile_scales"],
                    shape.num_tokens, None, None,
                )
            )  # fmt: skip
            lora_logits = _on_device(DeviceTokens.of_rows(parts["logit_slots"], scales["logit_scales"]))
        own, *windowed = (self._placed(kind) for kind in range(len(self._tables)))
        step = StepInputs(
            token_ids=parts["ids"][None],
            position_ids=parts["positions"][None],
            **own,
            prefill=(),
            logit_positions=parts["logit_positions"],
            lora=lora,
            lora_logits=lora_logits,
            is_long=parts["is_long"][None],
        )
        for fields in windowed:
            step = replace(step, windowed=replace(step, prepared={}, **fields))
        return step

    def _placed(self, kind: int) -> dict[str, Any]:
        """The fields of a step that follow from its blocks in layers of a kind."""
        parts, shape = self._parts, self.shape
        table = parts[_of_kind("table", kind)].view(-1, shape.width)
        return {
            "cache_positions": parts[_of_kind("places", kind)],
            "decode": DecodeRows(shape.num_rows, table[: shape.num_rows], parts["lengths"]),
            "tiled": TiledRows(parts["tiles"].view(-1, 4), table) if shape.num_long_tokens else None,
        }


def _put_adapter(row: Row, position: int, slots: _Numbers, scales: npt.NDArray[np.float32], place: int) -> None:
    """Notes the adapter that acts on a row's token at `position`, if one does."""
    if row.adapters and row.adapters[0].start <= position:
        slots[place], scales[place] = row.adapters[0].slot.index, row.adapters[0].scale


def _on_device(tokens: DeviceTokens) -> tuple[LoraTokens, ...]:
    return (LoraTokens((), len(tokens.slots), torch.zeros(0, 3, dtype=torch.int32), None, tokens),)
