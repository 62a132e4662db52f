"""One step as tensors, and the object through which the model's layers find it.

Rows lie end to end in one packed sequence of `num_tokens` tokens: rows of a single token (decode) first, then
longer ones (prefill chunks). There is no padding. The context is an object given to the layers at construction;
there is no global current batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lora_serve.core.batch import BASE_SLOT, RowAdapter
from lora_serve.model.system.device_memory import to_device


@dataclass(frozen=True, slots=True)
class OutputWidths:
    """The adapters of a step whose output layer has its own number of rows: of tokens, or of labels."""

    slots: frozenset[int]
    width: int  # columns of the step's logits: the largest layer's, the base model's at least


@dataclass(frozen=True, slots=True)
class StepVocabularies(OutputWidths):
    """The vocabularies of a step in which an adapter has its own."""

    token_ids: Tensor  # [1, num_tokens] int64, the true ids
    sizes: Tensor  # [num_logits] int64: the vocabulary behind each row of the logits

    @staticmethod
    def of(
        token_ids: Tensor, slots: Mapping[int, int], sizes: Sequence[int], base_size: int, device: torch.device
    ) -> StepVocabularies:
        """`slots`: sizes by slot. `sizes`: one per row of the logits; none if the step wants no logits."""
        width = max(base_size, *slots.values())
        counted = to_device(sizes or [width], torch.int64, device)
        return StepVocabularies(frozenset(slots), width, token_ids, counted)

    def cut(self, logits: Tensor) -> Tensor:
        """Sets logits [num_logits, width] of tokens beyond a row's vocabulary to -inf, in place.

        Done once the model has finished: what it does to logits (soft caps, scales) does not concern columns that do
        not exist.
        """
        columns = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill_(columns >= self.sizes[:, None], float("-inf"))


SHORT_SEGMENT = 64  # tokens; longer ones are tiles, which took 2.5 to 3.5 times as long at 64 tokens when it was chosen
TILE_TOKENS = 64  # of one matrix product of a long segment
QUERY_TILE = 16  # tokens of one row that one program of attention takes
PIECE = 32  # the most tokens of a segment that one thread takes at a time; CHUNK of native/lora.c
_SHORT_PIECE = 12  # where longer ones would leave threads without any
ChangeTable = Mapping[int, Any]  # an adapter's changes of one module by slot; kept up to date by `LoraSlots`
TokenPiece = tuple[int, int, float]  # number of tokens, slot (BASE_SLOT: none), scale


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """`LoraTokens` on a device: tokens of short segments by themselves, long segments as tiles of tokens.

    A tile is [first token, number of tokens, slot]. No tensor's size depends on the number of segments, so that a
    captured graph reads the same tensors in every step.
    """

    slots: Tensor  # [num_tokens] integers: the slot of tokens in short segments, -1 elsewhere
    scales: Tensor  # [num_tokens] float32
    tiles: Tensor  # [num_tiles, 3] integers
    tile_scales: Tensor  # [num_tiles] float32
    end_of_short: int  # of the last short segment; 0: there is none
    short_slots: frozenset[int] | None = None  # of tokens in short segments; None: a captured graph's, which may be any
    tile_slots: frozenset[int] | None = frozenset()  # likewise of tiles

    @staticmethod
    def of(num_tokens: int, segments: Sequence[LoraSegment], device: torch.device) -> DeviceTokens:
        """`segments`: in packed order; other tokens have no adapter. One copy."""
        slots, scales = torch.full((num_tokens,), BASE_SLOT, dtype=torch.int32), torch.ones(num_tokens)
        short, tiles, tile_scales = short_and_tiles(segments)
        for segment in short:
            slots[segment.start : segment.end], scales[segment.start : segment.end] = segment.slot, segment.scale
        end_of_short = short[-1].end if short else 0
        numbers = torch.tensor(tile_scales, dtype=torch.float32)
        places = torch.tensor(tiles, dtype=torch.int32).reshape(-1)
        host = torch.cat([slots, scales.view(torch.int32), places, numbers.view(torch.int32)])
        moved = to_device(host, torch.int32, device)
        parts = torch.split(moved, [num_tokens, num_tokens, 3 * len(tiles), len(tiles)])
        return DeviceTokens(
            parts[0], parts[1].view(torch.float32), parts[2].view(-1, 3), parts[3].view(torch.float32), end_of_short,
            frozenset(segment.slot for segment in short), frozenset(slot for *_, slot in tiles),
        )  # fmt: skip

    @property
    def all_slots(self) -> frozenset[int] | None:
        """The slots of all tokens; None: a captured graph's."""
        return None if self.short_slots is None or self.tile_slots is None else self.short_slots | self.tile_slots

    def of_each_token(self) -> tuple[Tensor, Tensor]:
        """The slot and the scale of each token [num_tokens], those in tiles too."""
        if not len(self.tiles):
            return self.slots, self.scales
        first, count, slot = self.tiles[..., None].unbind(1)
        token = torch.arange(len(self.slots), device=self.slots.device)
        is_inside = (token >= first) & (token < first + count)  # [num_tiles, num_tokens]
        slots = torch.where(is_inside, slot, self.slots).amax(0)
        scales = (is_inside * self.tile_scales[:, None]).sum(0)
        return slots, torch.where(is_inside.any(0), scales, self.scales)

    @staticmethod
    def of_rows(slots: Tensor, scales: Tensor) -> DeviceTokens:
        """One token per row, from buffers that stay in place: `slots` [rows] integers, `scales` [rows] float32."""
        no_tiles = torch.zeros(0, 3, dtype=torch.int32, device=slots.device)
        return DeviceTokens(slots, scales, no_tiles, scales[:0], len(slots))


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """The constants of a layer's attention: scores become scale * q k, with `softcap` c also c * tanh(score / c).

    With `window` w a token sees itself and the w - 1 before it, with `chunk` c none before the last multiple of c
    (Llama 4). With `sinks` s (arXiv 2309.17453, learned as in gpt-oss) head h weighs its keys as if there were one more
    of score s[h], whose value is zero.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)  # [num_heads] float32
    chunk: int | None = None

    def hides(self, length: int) -> bool:
        """True if some token of the first `length` does not see all before it."""
        return any(size is not None and length > size for size in (self.window, self.chunk))

    def first_seen(self, positions: Tensor) -> Tensor:
        """The first position that a token sees, by its own."""
        first = torch.zeros_like(positions) if self.chunk is None else positions // self.chunk * self.chunk
        return first if self.window is None else torch.maximum(first, positions - self.window + 1)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first `num_rows` tokens of the step: one query token per row."""

    num_rows: int
    block_table: Tensor  # [num_rows, max_blocks] int64, padded with block 0, which is always zero
    lengths: Tensor  # [num_rows] int64, keys to attend to, the token's own included


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row of several tokens: packed tokens start .. end, preceded by `context` cached tokens."""

    start: int
    end: int
    context: int
    blocks: Tensor  # [num_blocks] int64, covering context + (end - start) tokens


@dataclass(frozen=True, slots=True)
class TiledRows:
    """Rows of several tokens in a form whose sizes do not depend on the rows, for captured graphs."""

    tiles: Tensor  # [num_tiles, 4] int64: first packed token, tokens of one row (0: none), position, row of the table
    block_table: Tensor  # [rows, max_blocks] int64


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Neighbouring packed tokens start .. end that use the same slot with the same scale."""

    start: int
    end: int
    slot: int
    scale: float = 1.0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def short_and_tiles(
    segments: Iterable[LoraSegment],
) -> tuple[list[LoraSegment], list[tuple[int, int, int]], list[float]]:
    """The short segments, and the long ones' tiles (first token, number of tokens, slot) with their scales."""
    short: list[LoraSegment] = []
    tiles: list[tuple[int, int, int]] = []
    scales: list[float] = []
    for segment in segments:
        if segment.num_tokens <= SHORT_SEGMENT:
            short.append(segment)
        else:
            firsts = range(segment.start, segment.end, TILE_TOKENS)
            tiles += [(first, min(TILE_TOKENS, segment.end - first), segment.slot) for first in firsts]
            scales += [segment.scale] * len(firsts)
    return short, tiles, scales


def segments_of(pieces: Iterable[TokenPiece]) -> tuple[list[LoraSegment], int]:
    """Merges pieces in packed order, equal neighbours to one segment; and the number of tokens of all pieces."""
    segments: list[LoraSegment] = []
    position = 0
    for length, slot, scale in pieces:
        end = position + length
        last = segments[-1] if segments else None
        if last is not None and (last.slot, last.scale, last.end) == (slot, scale, position):
            segments[-1] = LoraSegment(last.start, end, slot, scale)
        elif length > 0 and slot != BASE_SLOT:
            segments.append(LoraSegment(position, end, slot, scale))
        position = end
    return segments, position


@dataclass(frozen=True, slots=True)
class LoraTokens:
    """The slot of each packed token; tokens of the base model are in no segment."""

    segments: tuple[LoraSegment, ...]
    num_tokens: int
    pieces: Tensor  # [num_pieces, 3] int32 on the CPU: segments cut evenly; first token, number of tokens, slot
    weights: Tensor | None  # [num_pieces] float32 on the CPU: their scales; None: all are 1
    on_device: DeviceTokens | None = None  # None on the CPU, whose kernels read the fields above

    def placed(self, device: torch.device) -> LoraTokens:
        """The tokens with their form on a device."""
        return replace(self, on_device=DeviceTokens.of(self.num_tokens, self.segments, device))

    @staticmethod
    def of(pieces: Iterable[TokenPiece]) -> LoraTokens:
        """The segments of pieces in packed order."""
        segments, num_tokens = segments_of(pieces)
        cut = [(segment, first, count) for segment in segments for first, count in _cut(segment)]
        table = torch.tensor([(first, count, segment.slot) for segment, first, count in cut], dtype=torch.int32)
        is_scaled = any(segment.scale != 1.0 for segment in segments)
        weights = torch.tensor([segment.scale for segment, *_ in cut]) if is_scaled else None
        return LoraTokens(tuple(segments), num_tokens, table.view(-1, 3), weights)


def _cut(segment: LoraSegment) -> Iterator[tuple[int, int]]:
    """First token and number of tokens of the segment's pieces, PIECE at most and as equal as can be."""
    fewest, most = (-(-segment.num_tokens // size) for size in (PIECE, _SHORT_PIECE))
    parts = max(fewest, min(most, torch.get_num_threads()))
    for part in range(parts):
        first, end = (segment.num_tokens * edge // parts for edge in (part, part + 1))
        yield segment.start + first, end - first


def passes_of(
    rows: Sequence[Sequence[RowAdapter]], spans: Sequence[tuple[int, int]], device: torch.device
) -> tuple[LoraTokens, ...]:
    """The passes over the packed tokens, one per adapter that a row composes; none if all rows are the base model's.

    `spans`: for each row the positions start .. end, in its sequence, of its packed tokens. Deltas add up, so the order
    of a row's adapters does not matter.
    """
    most = max((len(adapters) for adapters in rows), default=0)
    passes = (
        LoraTokens.of(
            piece
            for adapters, span in zip(rows, spans, strict=True)
            for piece in pieces_of(adapters[index] if index < len(adapters) else None, *span)
        )
        for index in range(most)
    )
    return tuple(tokens.placed(device) if device.type == "cuda" else tokens for tokens in passes)


def pieces_of(adapter: RowAdapter | None, start: int, end: int) -> tuple[TokenPiece, ...]:
    """The tokens at positions start .. end of a row, before its adapter begins and from there on."""
    if adapter is None:
        return ((end - start, BASE_SLOT, 1.0),)
    first = min(max(adapter.start, start), end)
    return (first - start, BASE_SLOT, 1.0), (end - first, adapter.slot.index, adapter.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStep:
    """The part of a step that layers with adapters read, in generation and pooling alike."""

    lora: tuple[LoraTokens, ...]  # of the tokens, see `passes_of`
    lora_logits: tuple[LoraTokens, ...]  # of the outputs: positions whose logits are wanted, or rows that were pooled
    vocabularies: OutputWidths | None = None  # None: every row has the base model's
    is_long: Tensor | None = None  # integers in the shape of the token ids, not 0 in long rows; None: in none is one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(AdapterStep):
    """All inputs of one forward pass beside the weights."""

    token_ids: Tensor  # [1, num_tokens] int64, of the base model's vocabulary
    position_ids: Tensor  # [1, num_tokens] int64
    cache_positions: Tensor  # [num_tokens] int64, flat index into the KV cache: block * block_size + offset
    decode: DecodeRows
    prefill: tuple[PrefillRow, ...]
    logit_positions: Tensor  # [num_logits] int64, packed tokens whose logits are wanted
    tiled: TiledRows | None = None  # in place of `prefill`, where the backend `reads_tiles`
    vocabularies: StepVocabularies | None = None
    prepared: dict[Hashable, Any] = field(default_factory=dict)  # attention's own, worked out once for all layers
    windowed: StepInputs | None = None  # in layers of the second kind, whose blocks are others; None: as in all

    def of_kind(self, kind: int) -> StepInputs:
        """The step as layers of a kind have it."""
        return self if kind == 0 or self.windowed is None else self.windowed

    def changes_any(self, tables: Sequence[ChangeTable]) -> bool:
        """True if a row's adapter changes one of these modules, so that a kernel cannot stand for them all."""
        filled = [table for table in tables if table]
        if not filled:
            return False
        slots = {segment.slot for tokens in self.lora for segment in tokens.segments}
        return any(slot in table for table in filled for slot in slots)


Step = TypeVar("Step", bound=AdapterStep)


class StepContext(Generic[Step]):
    """Holds the running step; `step` is only valid inside `running`."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self.number = 0  # of steps that have begun

    @property
    def step(self) -> Step:
        assert self._step is not None, "a layer ran outside of a step"
        return self._step

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        self._step = step
        self.number += 1
        try:
            yield
        finally:
            self._step = None
