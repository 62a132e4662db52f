"""Checks that rows laid out together give what the plain model gives for each row alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lora_serve.core.request import Task
from lora_serve.model.pooling.plan import PoolingPlan
from lora_serve.model.pooling.step import PoolingRow

_LENGTHS = (21, 1, 13, 37, 5, 5)  # tokens; two groups of attention, rows of like and of unlike lengths
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest number of an answer


def probe_rows(vocab_size: int, has_types: bool) -> tuple[PoolingRow, ...]:
    """Prompts of arbitrary token ids, with second texts where the model knows them."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        PoolingRow(
            tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()),
            tuple(int(i > length // 2) for i in range(length)) if has_types else (),
        )
        for length in _LENGTHS
    )


@torch.inference_mode()
def plain_answers(
    module: PreTrainedModel, plan: PoolingPlan, rows: Sequence[PoolingRow], device: torch.device
) -> tuple[Tensor, ...]:
    """The untouched model's answers, one row at a time: logits, or embeddings."""
    return tuple(_plain_answer(module, plan, row, device) for row in rows)


def _plain_answer(module: PreTrainedModel, plan: PoolingPlan, row: PoolingRow, device: torch.device) -> Tensor:
    ids = torch.tensor([row.token_ids], device=device)
    types = {"token_type_ids": torch.tensor([row.token_type_ids], device=device)} if row.token_type_ids else {}
    output: Any = module(input_ids=ids, **types)
    if plan.task is Task.CLASSIFY:
        logits: Tensor = output.logits[0].float()
        return logits
    hidden: Tensor = output.last_hidden_state[0].float()
    pooled: Tensor = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0), "max": hidden.amax(0)}[plan.pooling]
    for step in plan.steps:
        pooled = step(pooled)
    return pooled


def tolerance(dtype: torch.dtype) -> float:
    """The allowed error, as a part of an answer's largest number."""
    return _TOLERANCE[dtype]


def is_exact(answers: Tensor, expected: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """True if answers [num_rows, width] are within the tolerance of the expected ones."""
    plain = torch.stack(list(expected))
    worst = (answers - plain).abs().max() / plain.abs().max().clamp_min(1e-6)
    return bool(worst <= tolerance(dtype))
