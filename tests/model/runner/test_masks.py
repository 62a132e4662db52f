"""Rows that obey a grammar take what it allows, whatever else they ask for; other rows keep their bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lora_serve.core.batch import SampleInput
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.core.request import SamplingParams
from lora_serve.model.runner.sampler import choose

VOCABULARY, EOS = 700, 5


@dataclass(frozen=True)
class Allowed:
    """See `AllowedTokens`."""

    tokens: frozenset[int]
    size: int = VOCABULARY
    error: LoraServeError | None = None

    def wait(self) -> bytes:
        if self.error is not None:
            raise self.error
        bits = np.zeros(-(-self.size // 32) * 32, dtype=np.uint8)
        bits[list(self.tokens)] = 1
        return np.packbits(bits, bitorder="little").tobytes()


def row(allowed: set[int] | None, seed: int = 0, num_output: int = 3, **params: Any) -> SampleInput:
    mask = None if allowed is None else Allowed(frozenset(allowed))
    return SampleInput(SamplingParams(**params), seed, num_output, (EOS,), allowed=mask)


def some_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_p": 0.9, "top_k": 5, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1e-6, "presence_penalty": 2.0},
    {"temperature": 0.0, "logit_bias": ((3, 100.0), (699, -100.0))},
    {"temperature": 0.0, "min_tokens": 9, "ignore_eos": True, "stop_token_ids": (8, 9)},
)


@pytest.mark.parametrize("params", WAYS)
def test_token_is_one_that_may_come(params: dict[str, Any]) -> None:
    for seed in range(20):
        allowed = {seed, seed + 300, 699}
        (choice,) = choose(some_logits(1, seed), [row(allowed, seed, **params)])
        assert choice.is_number
        assert choice.error is None
        assert choice.token_id in allowed


@pytest.mark.parametrize("params", WAYS)
def test_other_rows_choose_as_they_would_alone(params: dict[str, Any]) -> None:
    logits = some_logits(6)
    kept = logits.clone()
    alone = [row(None, i, logprobs=3, **params) for i in range(6)]
    mixed = [row({7, 8}, i, logprobs=3, **params) if i % 2 else alone[i] for i in range(6)]
    expected, found = choose(logits, alone), choose(logits, mixed)
    assert [found[i] for i in (0, 2, 4)] == [expected[i] for i in (0, 2, 4)]
    assert all(found[i].token_id in {7, 8} for i in (1, 3, 5))
    assert torch.equal(logits, kept)


def test_mask_of_everything_changes_nothing() -> None:
    logits = some_logits(4)
    rows = [row(None, i, temperature=1.0, logprobs=2) for i in range(4)]
    everything = [row(set(range(VOCABULARY)), i, temperature=1.0, logprobs=2) for i in range(4)]
    assert choose(logits, everything) == choose(logits, rows)


def test_log_probabilities_are_those_of_what_was_allowed() -> None:
    logits = some_logits(1)
    (choice,) = choose(logits, [row({10, 20}, temperature=0.0, logprobs=5, logit_bias=((10, 50.0),))])
    expected = torch.log_softmax(logits[0, [10, 20]], dim=-1).tolist()
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(expected[0])
    found = dict(choice.logprobs.top)
    assert sorted(found) == [10, 20]
    assert found == {10: pytest.approx(expected[0]), 20: pytest.approx(expected[1])}


@pytest.mark.parametrize("params", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_end_waits_while_anything_else_may_come(params: dict[str, Any]) -> None:
    logits = some_logits(1)
    logits[0, EOS] = 100.0
    assert choose(logits, [row({EOS, 20}, temperature=1.0, **params)])[0].token_id == 20
    assert choose(logits, [row({EOS}, temperature=1.0, **params)])[0].token_id == EOS
    assert choose(logits, [row({EOS, 20}, temperature=1.0)])[0].token_id == EOS


def test_forbidding_all_that_may_come_forbids_nothing() -> None:
    """No other token, and no number that is none."""
    bias = ((10, float("-inf")), (20, float("-inf")))
    for temperature in (0.0, 1.0):
        (choice,) = choose(some_logits(1), [row({10, 20}, temperature=temperature, logit_bias=bias, logprobs=2)])
        assert choice.is_number
        assert choice.token_id in {10, 20}


def test_row_whose_grammar_fails_or_allows_nothing_ends_alone() -> None:
    error = InvalidRequestError("too complex")
    failing = SampleInput(SamplingParams(), 1, 3, (EOS,), allowed=Allowed(frozenset(), error=error))
    logits = some_logits(4)
    free = row(None, 2, temperature=1.0, logprobs=1)
    choices = choose(logits, [free, failing, row(set(), temperature=1.0), row({4}, temperature=1.0)])
    assert choices[0] == choose(logits[:1], [free])[0]
    assert choices[1].error is error
    assert isinstance(choices[2].error, InvalidRequestError)
    assert choices[3].token_id == 4


@pytest.mark.parametrize("size", [32, 640, 700, 6400])
def test_masks_of_other_vocabularies_share_a_step(size: int) -> None:
    own = SampleInput(SamplingParams(temperature=1.0), 1, 3, (EOS,), allowed=Allowed(frozenset({31, size - 1}), size))
    choices = choose(some_logits(2), [own, row({699}, temperature=1.0)])
    assert choices[0].token_id in {31, size - 1}
    assert choices[1].token_id == 699


def test_row_that_is_not_a_number_is_still_seen() -> None:
    logits = some_logits(2)
    logits[0] = float("nan")
    choices = choose(logits, [row({4}, temperature=1.0), row({4}, temperature=1.0)])
    assert [choice.is_number for choice in choices] == [False, True]


def test_other_lists_of_tokens_allow_nothing_that_the_grammar_does_not() -> None:
    (choice,) = choose(some_logits(1), [row({10, 20}, temperature=0.0, allowed_token_ids=(20, 30))])
    assert choice.token_id == 20
    (choice,) = choose(some_logits(1), [row({10}, temperature=1.0, allowed_token_ids=(20, 30))])
    assert choice.token_id == 10
    (choice,) = choose(some_logits(1), [row({10, 20}, temperature=1.0, bad_words=((10,),))])
    assert choice.token_id == 20


def test_token_beyond_the_vocabulary_is_none_that_may_come() -> None:
    beyond = SampleInput(SamplingParams(), 1, 3, (EOS,), allowed=Allowed(frozenset({VOCABULARY + 1}), 800))
    assert VOCABULARY % 8, "or no byte of the mask is shared"
    assert isinstance(choose(some_logits(1), [beyond])[0].error, InvalidRequestError)
