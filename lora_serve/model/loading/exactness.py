"""Refuses a base model whose packed, paged forward pass differs from that of its plain self."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lora_serve.core.batch import Batch, Row, RowOutput
from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.model.loading.frozen_model import LoadedModel

# The tokens of each step of each probe sequence: prefill, continued prefill and decode rows in one batch.
SHORT = ((7, 5, 1), (1, 6, 2))
LONG = ((13, 14, 1, 1), (20, 29, 1, 7), (130, 90, 31, 1))  # of a small copy: on both sides of its boundaries
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.3, torch.float16: 0.1}  # of a log-probability
_NOISE = {torch.float32: 0.0, torch.bfloat16: 0.12, torch.float16: 0.02}  # of their spread, in the root mean square

Probe = tuple[tuple[int, ...], ...]
Chunks = tuple[tuple[int, ...], ...]


def probe_tokens(vocab_size: int, chunks: Chunks = SHORT) -> Probe:
    """Sequences of arbitrary token ids, as long as their chunks."""
    generator = torch.Generator().manual_seed(0)
    return tuple(tuple(torch.randint(vocab_size, (sum(n),), generator=generator).tolist()) for n in chunks)


@torch.inference_mode()
def plain_logprobs(loaded: LoadedModel, probe: Probe) -> list[list[float]]:
    """log p(token | tokens before it) of every token but the first, by the untouched model in one pass.

    Shorter sequences end in padding: no token of a causal model sees a later one.
    """
    ids = torch.zeros(len(probe), max(map(len, probe)), dtype=torch.int64, device=loaded.device)
    for row, tokens in zip(ids, probe, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    logits = loaded.module(input_ids=ids, use_cache=False).logits
    return [
        logprobs[: len(tokens) - 1].gather(1, row[1 : len(tokens), None])[:, 0].tolist()
        for logprobs, row, tokens in zip(logits.float().log_softmax(-1), ids, probe, strict=True)
    ]


def check_exactness(
    run: Callable[[Batch], Sequence[RowOutput]], expected: Sequence[Sequence[float]], probe: Probe, block_size: int,
    dtype: torch.dtype, architecture: str, chunks: Chunks = SHORT, rope: LongRope = ONE_ROPE,
) -> None:  # fmt: skip
    """Runs the probe in uneven chunks, all sequences in one batch, and compares. Raises ModelError."""
    width = -(-max(map(len, probe)) // block_size)
    tables = [tuple(range(1 + i * width, 1 + (i + 1) * width)) for i in range(len(probe))]
    found: list[list[float]] = [[] for _ in probe]
    starts = [0] * len(probe)
    for lengths in zip(*chunks, strict=True):
        rows = tuple(
            Row(
                i, tokens[start : start + n], start, table, (), None, (*tokens, 0)[start + 1 : start + n + 1],
                is_long=rope.is_long(len(tokens), len(tokens)),
            )
            for i, (tokens, start, n, table) in enumerate(zip(probe, starts, lengths, tables, strict=True))
        )  # fmt: skip
        for i, output in enumerate(
            run(Batch(rows, tuple(b for table in tables for b in table) if not any(starts) else ()))
        ):
            if output.error is not None:
                raise ModelError(f"{architecture} cannot be served: {output.error}")
            found[i].extend(item.logprob for item in output.prompt_logprobs)
        starts = [start + n for start, n in zip(starts, lengths, strict=True)]
    mine = torch.tensor([value for values in found for value in values[:-1]])
    plain = torch.tensor([value for values in expected for value in values])
    if not _are_near(mine, plain, dtype):
        worst = float((mine - plain).abs().max())
        noise = f", or {_NOISE[dtype]:.0%} of their spread in the root mean square" if _NOISE[dtype] else ""
        raise ModelError(
            f"{architecture} cannot be served exactly: packed rows over a paged cache give log-probabilities that "
            f"differ by {worst:.3g} from the model's own (allowed: {_TOLERANCE[dtype]:g}{noise})"
        )


def _are_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if log-probabilities differ by little, or by as much as rounding may make of such a spread.

    Rounding moves large logits further: of deep or sharp models in bfloat16, transformers' own numbers are off by half
    a nat from those in float32 here and there. A window that is one too long moves them by a fifth of their spread, a
    token that is not seen by more.
    """
    difference = found - expected
    is_near = difference.abs().max() <= _TOLERANCE[dtype]
    return bool(is_near or difference.square().mean().sqrt() <= _NOISE[dtype] * expected.std())
