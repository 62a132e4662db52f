"""A step waits for the device once; twice only where a row keeps more tokens than the sampler looks at first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lora_serve.core.batch import SampleInput
from lora_serve.core.request import SamplingParams
from lora_serve.model.runner import sampler
from lora_serve.model.runner.sampler import choose, draw, logprobs_of


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def counted(*tensors: torch.Tensor) -> list[torch.Tensor]:
        found.append(len(tensors))
        return list(tensors)

    monkeypatch.setattr(sampler, "to_host", counted)
    return found


def rows(**params: Any) -> list[SampleInput]:
    return [SampleInput(SamplingParams(**params), seed, 3, ()) for seed in range(5)]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}, {"temperature": 1.0, "top_p": 0.9, "top_k": 9}],
)
def test_one_wait_whatever_is_asked_for(waits: list[int], params: dict[str, Any]) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * 4
    inputs = rows(**params)
    choices = choose(logits, inputs)
    assert len(waits) == 1
    tokens, _ = draw(logits, inputs)
    assert [choice.token_id for choice in choices] == tokens.tolist()
    expected = logprobs_of(logits, tokens, [2] * 5) if "logprobs" in params else [None] * 5
    assert [choice.logprobs for choice in choices] == expected


def test_flat_rows_are_drawn_again_among_all_tokens(waits: list[int]) -> None:
    logits = torch.zeros(200, 700)
    inputs = [SampleInput(SamplingParams(temperature=1.0, top_p=0.99, logprobs=1), i, 3, ()) for i in range(200)]
    choices = choose(logits, inputs)
    assert len(waits) == 2
    assert len({choice.token_id for choice in choices}) > 150
    assert all(choice.logprobs is not None and choice.logprobs.token_id == choice.token_id for choice in choices)


def test_row_that_is_not_a_number_makes_nobody_wait_again(waits: list[int]) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * 9
    logits[2] = float("nan")
    logits[0, 1:] = float("-inf")  # a model may forbid tokens
    choices = choose(logits, rows(temperature=1.0, top_p=0.5))
    assert [choice.is_number for choice in choices] == [True, True, False, True, True]
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("where", "value"), [(slice(3, 4), math.inf), (slice(None), math.inf), (slice(None), -math.inf)]
)
def test_row_without_a_finite_best_is_no_answer(waits: list[int], where: slice, value: float) -> None:
    """Its probabilities are not numbers; no JSON could hold its log-probabilities."""
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * 9
    logits[2, where] = value
    choices = choose(logits, rows(temperature=0.0, logprobs=2))
    assert [choice.is_number for choice in choices] == [True, True, False, True, True]
