"""The step's only wait for the device: everything that the host wants to know of a step comes in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.core.batch import SampleInput
from lora_serve.core.messages import TokenLogprobs
from lora_serve.model.runner.sampler import draw, draw_again, logprob_columns, logprobs_from
from lora_serve.model.system.transfer import to_device, to_host


@dataclass(frozen=True, slots=True)
class Choice:
    """One row's next token."""

    token_id: int
    logprobs: TokenLogprobs | None  # None: not asked for
    is_number: bool  # False: the logits are none, and so the token means nothing


def choose(logits: Tensor, rows: Sequence[SampleInput]) -> list[Choice]:
    """One token per row of logits [rows, vocab] float32.

    Rows that keep more than the sampler's candidates, which flat distributions alone do, make it wait twice.
    """
    is_number = logits.amax(dim=-1).isfinite()  # amax passes NaN on; a token alone may be at -inf
    tokens, is_settled = draw(logits, rows)
    choices, settled = _read(logits, rows, tokens, is_settled, is_number)
    if settled:
        return choices
    tokens = draw_again(logits, rows, tokens, is_settled)
    return _read(logits, rows, tokens, is_settled, is_number)[0]


def _read(
    logits: Tensor, rows: Sequence[SampleInput], tokens: Tensor, is_settled: Tensor, is_number: Tensor
) -> tuple[list[Choice], bool]:
    """The choices, and whether no row has to be drawn again."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    num_top = [rows[i].params.logprobs or 0 for i in wanted]
    columns: tuple[Tensor, ...] = ()
    if wanted:
        index = to_device(wanted, torch.int64, logits.device)
        columns = logprob_columns(logits[index], tokens[index], num_top)
    ids, settled, fine, *found = to_host(tokens, is_settled, is_number, *columns)
    logprobs = dict(zip(wanted, logprobs_from(found, num_top), strict=True)) if wanted else {}
    choices = [
        Choice(token, logprobs.get(i), good)
        for i, (token, good) in enumerate(zip(ids.tolist(), fine.tolist(), strict=True))
    ]
    return choices, bool((settled | ~fine).all())
