"""Counts the tokens of each arrival.

A server may send several tokens in one chunk, events in one packet, or none of a token's text (half of a UTF-8
character), so chunks are not tokens. Events that were read at one moment are one arrival. Its tokens are, whichever is
there first:

1. continuous: the growth of `usage.completion_tokens` that the chunk itself tells: exact;
2. ids: the chunk's `token_ids`: exact;
3. usage: the total of the last chunk, spread evenly over the arrivals that bear content: the total and the time of
   the first and of the last token are exact, the distances between are averages;
4. chunks: one token for each chunk that bears content: a guess, and the report says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.commands.bench.result import Chunk, CountedBy


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event."""

    time: float
    bears_content: bool
    total: int | None = None  # completion tokens until now
    num_ids: int | None = None


def count_tokens(pieces: Sequence[Piece], total: int | None) -> tuple[tuple[Chunk, ...], CountedBy]:
    """Arrivals with one token at least, in order. `total`: of the usage that came alone, after the choices."""
    counts, counted_by = _counts(pieces, total)
    arrivals = itertools.groupby(zip(pieces, counts, strict=True), key=lambda pair: pair[0].time)
    sums = (Chunk(time, sum(count for _, count in group)) for time, group in arrivals)
    return tuple(chunk for chunk in sums if chunk.num_tokens), counted_by


def _counts(pieces: Sequence[Piece], total: int | None) -> tuple[list[int], CountedBy]:
    first = next((piece for piece in pieces if piece.bears_content), None)
    if first is not None and first.total is not None:
        known = itertools.accumulate((piece.total or 0 for piece in pieces), max, initial=0)
        return [later - earlier for earlier, later in itertools.pairwise(known)], "continuous"
    if any(piece.num_ids is not None for piece in pieces):
        return [piece.num_ids or 0 for piece in pieces], "ids"
    bearing = [piece.bears_content for piece in pieces]
    if total is None and pieces:
        total = pieces[-1].total  # some servers count once, in the last chunk of the choice
    if total is None:
        return [int(bears) for bears in bearing], "chunks"
    if pieces and not any(bearing):
        bearing[-1] = True  # all of it came at the end, and none of it is text
    shares = iter(_spread(total, sum(bearing)))
    return [next(shares) if bears else 0 for bears in bearing], "usage"


def _spread(total: int, places: int) -> list[int]:
    """Spreads `total` evenly in whole numbers; the first place gets at least one."""
    borders = [-(-place * total // max(1, places)) for place in range(places + 1)]
    return [later - earlier for earlier, later in itertools.pairwise(borders)]
