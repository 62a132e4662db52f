"""Swapping of KV blocks to host memory: the table of host blocks, and the choice between copying and recomputing.

Learned costs decide for each preempted sequence: seconds per block copied, both ways, against seconds per token
computed (`step_cost.py`); vLLM left the choice to a flag (Kwon et al., SOSP 2023, section 4.5). The bytes are
in `model/kv_cache.py`. A host block that is copied back is free only after the copies were taken, as copies to host
memory come first.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import chain

from lora_serve.core.batch import BlockCopy, BlockMoves
from lora_serve.core.stats import SwapStats
from lora_serve.engine.blocks import BlockTables
from lora_serve.engine.sequence import Sequence, SwappedBlocks
from lora_serve.engine.step_cost import StepCost

_WEIGHT = 0.1  # of the newest copies


class SwapSpace:
    """Host blocks 0 .. num_blocks - 1 of one kind of layers, each of them free or held."""

    def __init__(self, num_blocks: int, kind: int = 0) -> None:
        self.num_blocks = num_blocks
        self.kind = kind
        self._free = list(range(num_blocks - 1, -1, -1))  # the lowest is given out first, so that few pages are touched
        self._is_held = [False] * num_blocks
        self._out: dict[int, int] = {}  # host block -> block, copies that are due
        self._back: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def swap_out(self, blocks: list[int]) -> tuple[int, ...]:
        """Host blocks for these device blocks, which must be free; the copies are due with the next moves."""
        assert len(blocks) <= self.num_free, "host blocks were not checked before they were taken"
        held = tuple(self._free.pop() for _ in blocks)
        for host_block, block in zip(held, blocks, strict=True):
            self._is_held[host_block] = True
            self._out[host_block] = block
        return held

    def swap_in(self, held: tuple[int, ...], blocks: list[int]) -> None:
        """Makes the copies back to the device due. The host blocks stay held until they are released."""
        for host_block, block in zip(held, blocks, strict=True):
            assert self._is_held[host_block], "a host block that is not held is read"
            self._back[host_block] = block

    def cancel_swap_in(self, held: Iterable[int]) -> None:
        """Cancels due copies back to the device."""
        for host_block in held:
            self._back.pop(host_block, None)

    def release(self, held: Iterable[int]) -> None:
        """Frees host blocks and cancels their due copies."""
        for host_block in held:
            assert self._is_held[host_block], "a host block was released twice"
            self._is_held[host_block] = False
            self._out.pop(host_block, None)
            self._back.pop(host_block, None)
            self._free.append(host_block)

    def take_moves(self) -> BlockMoves:
        """The copies that are due; the caller makes them before anything is written."""
        moves = BlockMoves(self._copies(self._out), self._copies(self._back))
        self._out, self._back = {}, {}
        return moves

    def _copies(self, due: dict[int, int]) -> tuple[BlockCopy, ...]:
        return tuple(BlockCopy(block, host_block, self.kind) for host_block, block in due.items())


@dataclass(eq=False)
class Swapping:
    """Connects preempted sequences with the tables of host blocks, one for each kind of layers."""

    _spaces: Items[SwapSpace]
    _blocks: BlockTables
    _cost: StepCost
    _seconds_per_block: float  # of one copy; measured at start, then learned
    _returning: list[Sequence] = field(default_factory=list)  # their blocks are on the way back
    _num_swapped: int = 0
    _num_recomputed: int = 0

    def swap_out(self, sequence: Sequence) -> None:
        """Keeps the blocks of a preempted sequence that are cheaper to copy than to compute.

        Blocks at its beginning that have other readers are not copied: the sequence finds them again while they are
        known. Of one that has dropped blocks all that it holds are: what it would find begins with those.
        """
        if sequence in self._returning:
            assert sequence.swapped is not None
            self._returning.remove(sequence)
            for space, held in zip(self._spaces, sequence.swapped.host_blocks, strict=True):
                space.cancel_swap_in(held)
            self._num_swapped += 1
            return
        dropped, tables = sequence.num_dropped, list(self._blocks.of(sequence))
        num_found = 0 if dropped else min(kind.num_shared_of(table) for kind, table in tables)
        first = (*[num_found] * (len(tables) - 1), num_found or dropped)
        end = self._blocks.num_needed(sequence.num_computed)
        own = [table[start:end] for (_, table), start in zip(tables, first, strict=True)]
        num_tokens = sequence.num_computed - num_found * self._blocks.block_size
        if not any(own) or not self._is_worth_it([len(blocks) for blocks in own], num_tokens):
            self._num_recomputed += 1
            return
        on_host = tuple(space.swap_out(blocks) for space, blocks in zip(self._spaces, own, strict=True))
        sequence.swapped = SwappedBlocks(first, on_host, sequence.num_computed, dropped)
        self._num_swapped += 1

    def swap_in(self, sequence: Sequence) -> None:
        """Brings back the blocks of a resumed sequence, behind those that the prefix cache found.

        If less was found than when it was preempted, its host blocks do not fit behind that and are given up, unless
        what lies before them is not needed.
        """
        swapped = sequence.swapped
        if swapped is None:
            return
        end, dropped = len(sequence.blocks), swapped.num_dropped
        *all_seen, windowed = swapped.first
        is_behind = all(end >= first for first in all_seen) and (end >= windowed or windowed == dropped)
        if not is_behind or sequence.num_computed >= swapped.num_tokens:
            self.discard(sequence)
            return
        assert sequence.num_computed == end * self._blocks.block_size, "only full blocks are found"
        self._blocks.drop(sequence, dropped)
        first, left = [], []
        for space, (kind, table), start, held in zip(
            self._spaces, self._blocks.of(sequence), swapped.first, swapped.host_blocks, strict=True
        ):
            num_found = len(table) - start
            space.release(held[:num_found])
            first.append(start + num_found)
            left.append(held[num_found:])
            blocks = kind.allocate(len(left[-1]), is_filled=True)
            space.swap_in(left[-1], blocks)
            table.extend(blocks)
        sequence.swapped = replace(swapped, first=tuple(first), host_blocks=tuple(left))
        sequence.num_computed = swapped.num_tokens
        self._returning.append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Releases the host blocks of a sequence that has ended or no longer needs them."""
        if sequence.swapped is None:
            return
        if sequence in self._returning:
            self._returning.remove(sequence)
        for space, held in zip(self._spaces, sequence.swapped.host_blocks, strict=True):
            space.release(held)
        sequence.swapped = None

    def take_moves(self) -> BlockMoves:
        """The copies that are due before the step that is being composed."""
        out, back = zip(
            *((moves.out, moves.back) for moves in (space.take_moves() for space in self._spaces)), strict=True
        )
        for sequence in list(self._returning):
            self.discard(sequence)
        return BlockMoves(tuple(chain(*out)), tuple(chain(*back)))

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learns from a copy of so many blocks that took `seconds`."""
        self._seconds_per_block += _WEIGHT * (seconds / num_blocks - self._seconds_per_block)

    def stats(self) -> SwapStats:
        return SwapStats(
            self._num_swapped, self._num_recomputed, sum(space.num_blocks for space in self._spaces),
            sum(space.num_used for space in self._spaces), self._seconds_per_block,
        )  # fmt: skip

    def _is_worth_it(self, num_blocks: Items[int], num_tokens: int) -> bool:
        if any(count > space.num_free for count, space in zip(num_blocks, self._spaces, strict=True)):
            return False
        return 2 * sum(num_blocks) * self._seconds_per_block < num_tokens * self._cost.seconds_per_token
