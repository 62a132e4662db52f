"""Draws by inverse transform, on tensors with one line per row: the sampler's maths, eager or captured in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

COLDEST = 1e-4  # temperatures below are greedy: dividing by them would overflow
NUM_CANDIDATES = 256  # top-k / top-p / min-p look at this many best tokens first, at all only when they must


class Cuts(NamedTuple):
    """The limits of rows of which not all tokens may come, each [rows, 1]."""

    top_k: Tensor  # int64; 0: none
    top_p: Tensor  # float32
    min_p: Tensor  # float32


def uniform(seeds: Sequence[int], counters: Sequence[int]) -> Tensor:
    """Uniform numbers in (0, 1), one per (seed, counter): SplitMix64 (Steele et al., OOPSLA 2014). Returns [rows]
    float64.
    """
    z = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    count = np.array(counters, dtype=np.uint64)
    for step in (np.uint64(0), count):  # mix the seed before the counter: neighbouring seeds stay unrelated
        z = z + (step + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy(((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def are_numbers(logits: Tensor) -> Tensor:
    """[rows] bool: False where the logits are NaN or infinite; a token alone may be at -inf."""
    return logits.amax(dim=-1).isfinite()  # amax passes NaN on


def warmed(logits: Tensor, temperature: Tensor) -> Tensor:
    """The probabilities [rows, vocab] of logits at temperatures [rows, 1]; the best is put at 0 before, so that no
    temperature makes an infinity of it.
    """
    return torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def draw_whole(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Inverse transform over the vocabulary in its own order; probabilities [rows, vocab], numbers [rows, 1]."""
    cumulative = probabilities.double().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
    return drawn.clamp_(max=probabilities.shape[1] - 1)


def draw_truncated(
    probabilities: Tensor, numbers: Tensor, cuts: Cuts, num_candidates: int = NUM_CANDIDATES
) -> tuple[Tensor, Tensor]:
    """Inverse transform over the tokens kept by min-p, top-k and top-p, best first; and whether those are all."""
    vocabulary = probabilities.shape[1]
    best = probabilities.topk(min(num_candidates, vocabulary), dim=-1)
    kept = _kept(best.values, cuts, vocabulary)
    positions = draw_whole(kept, numbers)
    is_final = (kept[:, -1] == 0) | (best.values.shape[1] == vocabulary)
    return best.indices.gather(1, positions[:, None])[:, 0], is_final


def _kept(ordered: Tensor, cuts: Cuts, vocabulary: int) -> Tensor:
    """`ordered` [rows, candidates] descending, with 0 where min-p, top-k or top-p cut; rows of their own sums."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)[None, :]
    top_k = cuts.top_k.masked_fill(cuts.top_k == 0, vocabulary)
    kept = ordered.masked_fill((ordered < cuts.min_p * ordered[:, :1]) | (ranks >= top_k), 0.0)
    # without min-p and top-k the whole row sums to 1, also when only its best candidates are here
    is_cut = (top_k <= ordered.shape[1]) | (kept[:, -1:] == 0)
    total = torch.where(is_cut, kept.sum(dim=-1, keepdim=True), torch.ones_like(cuts.min_p))
    before = kept.cumsum(dim=-1) - kept
    return kept.masked_fill((before >= cuts.top_p * total) & (ranks > 0), 0.0)


class DrawKinds(NamedTuple):
    """The kinds of draws that some row of a captured step asks for, beside its largest logit."""

    whole: bool  # a draw among all of the vocabulary
    truncated: bool  # a draw among the tokens that are not cut


class DrawColumns(NamedTuple):
    """The numbers that decide a token at each position of a captured step, each [positions] float64, in its memory.
    All zero but for the temperature: the largest logit.
    """

    kind: Tensor  # 0: the largest logit, 1: whole, 2: truncated
    number: Tensor  # uniform in (0, 1)
    temperature: Tensor  # above 0
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def draw_captured(logits: Tensor, columns: DrawColumns, kinds: DrawKinds) -> Tensor:
    """logits [positions, vocab] float32 -> [3, positions] int64: token ids; 1 where they are final; 1 where the logits
    are numbers. A token that is not final has to be drawn again among more. The tokens are those of `sampler.draw`.
    """
    tokens = logits.argmax(dim=-1)
    is_final = torch.ones_like(tokens, dtype=torch.bool)
    if kinds.whole or kinds.truncated:
        kind, number = columns.kind.long(), columns.number[:, None]
        probabilities = warmed(logits, columns.temperature.float()[:, None])
        if kinds.whole:
            tokens = torch.where(kind == 1, draw_whole(probabilities, number), tokens)
        if kinds.truncated:
            cuts = Cuts(columns.top_k.long()[:, None], columns.top_p.float()[:, None], columns.min_p.float()[:, None])
            drawn, are_all = draw_truncated(probabilities, number, cuts)
            tokens = torch.where(kind == 2, drawn, tokens)
            is_final = are_all | (kind != 2)
    return torch.stack((tokens, is_final.long(), are_numbers(logits).long()))
