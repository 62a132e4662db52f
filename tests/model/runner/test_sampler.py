"""Sampling against transformers' own logits processors, and its independence of neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lora_serve.core.batch import SampleInput
from lora_serve.core.request import SamplingParams
from lora_serve.model.runner.draws import uniform
from lora_serve.model.runner.sampler import choose, logprobs_of

VOCABULARY = 300
ANY_IDS = torch.zeros(1, 1, dtype=torch.int64)


def row(seed: int = 0, count: int = 0, **params: Any) -> SampleInput:
    prompt, output = params.pop("prompt", ()), params.pop("output", ())
    return SampleInput(SamplingParams(**params), seed, count, (7,), prompt, output)


def sample(logits: torch.Tensor, rows: list[SampleInput]) -> torch.Tensor:
    return torch.tensor([choice.token_id for choice in choose(logits, rows)])


def draws(logits: torch.Tensor, num: int, **params: Any) -> torch.Tensor:
    """How often each token is drawn in `num` draws of one row: [vocabulary], sums to 1."""
    tokens = sample(logits.expand(num, -1), [row(seed=3, count=i, **params) for i in range(num)])
    return torch.bincount(tokens, minlength=VOCABULARY) / num


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.3, "top_k": 5}, [TemperatureLogitsWarper(1.3), TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"temperature": 5.0, "top_p": 0.98}, [TemperatureLogitsWarper(5.0), TopPLogitsWarper(0.98)]),
        ({"temperature": 1.0, "min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 1.0, "min_p": 0.01, "top_k": 20, "top_p": 0.8},
            [MinPLogitsWarper(0.01), TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
        ),
    ],
)
def test_distribution_is_transformers(logits: torch.Tensor, params: dict[str, Any], warpers: list[Any]) -> None:
    warped = logits.clone()
    for warper in warpers:
        warped = warper(ANY_IDS, warped)
    truth = torch.softmax(warped[0], -1)
    found = draws(logits, 20_000, **params)
    assert not found[truth == 0].any(), "a token that was cut off was drawn"
    assert (found - truth).abs().max() < 0.02
    assert (found[truth > 0.005] > 0).all()


def test_rows_wider_than_the_first_candidates_are_not_cut() -> None:
    flat = torch.zeros(1, 1000)
    tokens = sample(flat.expand(4000, -1), [row(seed=1, count=i, temperature=1.0, top_p=0.9) for i in range(4000)])
    assert len(tokens.unique()) > 700


def test_zero_temperature_is_argmax(logits: torch.Tensor) -> None:
    assert sample(logits, [row(temperature=0.0)]).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, [row(temperature=1e-30)]).tolist() == logits.argmax(-1).tolist()


def test_seeded_row_draws_the_same_alone_and_in_any_company(logits: torch.Tensor) -> None:
    kinds = [
        {"temperature": 0.9},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 3},
    ]
    company = [row(seed=i, count=i % 5, **kinds[i % 4]) for i in range(23)]
    many = logits + torch.randn(23, VOCABULARY, generator=torch.Generator().manual_seed(2))
    together = sample(many, company).tolist()
    alone = [sample(many[i : i + 1], [company[i]]).item() for i in range(23)]
    assert together == alone
    order = list(reversed(range(23)))
    assert sample(many[order], [company[i] for i in order]).tolist() == [together[i] for i in order]


def test_token_among_equally_good_ones_does_not_depend_on_a_neighbour_that_is_drawn_again() -> None:
    tied = torch.randint(0, 6, (60, 1000), generator=torch.Generator().manual_seed(4)).float()
    flat = torch.zeros(1, 1000)
    few = [row(seed=seed, top_k=5) for seed in range(60)]
    alone = sample(tied, few).tolist()
    assert sample(torch.cat([tied, flat]), [*few, row(top_p=0.99)])[:60].tolist() == alone
    choices = choose(torch.cat([tied, flat]), [*few, row(top_p=0.99)])
    assert [choice.token_id for choice in choices][:60] == alone


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_huge_reward_for_a_repeated_token_draws_that_token(logits: torch.Tensor, params: dict[str, Any]) -> None:
    token = int(logits.argsort()[0, -9])  # a good one, though not the best
    assert logits[0, token] > 0
    assert sample(logits, [row(repetition_penalty=1e-40, prompt=(token,), **params)]).item() == token


def test_lowest_temperature_and_huge_logits_draw_the_best(logits: torch.Tensor) -> None:
    best = logits.argmax().item()
    assert sample(logits * 1e35, [row(temperature=1e-4)]).item() == best
    assert sample(logits * 1e35, [row(temperature=1e-4, top_p=0.5)]).item() == best


def test_uniform_numbers_are_uniform_and_unrelated_between_seeds_and_counters() -> None:
    numbers = uniform([seed for seed in range(200) for _ in range(100)], [c for _ in range(200) for c in range(100)])
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert (torch.histc(numbers.float(), 20, 0, 1) / 20_000 - 0.05).abs().max() < 0.008
    table = numbers.view(200, 100)
    assert torch.corrcoef(table[:20]).fill_diagonal_(0).abs().max() < 0.5
    assert len(numbers.unique()) == 20_000


def test_repetition_penalty_is_transformers(logits: torch.Tensor) -> None:
    prompt, output = (1, 2, 3), (4, 4, 5)
    truth = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *output]]), logits.clone())
    inputs = row(temperature=0.0, repetition_penalty=1.7, prompt=prompt, output=output)
    found = penalised(logits, inputs)
    assert torch.allclose(found, truth)


def test_frequency_and_presence_penalties_are_openais(logits: torch.Tensor) -> None:
    output = (4, 4, 5)
    found = penalised(logits, row(frequency_penalty=0.5, presence_penalty=0.25, prompt=(9,), output=output))
    truth = logits.clone()
    truth[0, 4] -= 2 * 0.5 + 0.25
    truth[0, 5] -= 0.5 + 0.25
    assert torch.allclose(found, truth)


def penalised(logits: torch.Tensor, inputs: SampleInput) -> torch.Tensor:
    from lora_serve.model.runner.sampler import _adjusted

    before = logits.clone()
    found = _adjusted(logits, [inputs])
    assert torch.equal(logits, before), "the caller's logits were changed"
    return found


def test_bias_and_forbidden_ends_touch_their_own_row_only(logits: torch.Tensor) -> None:
    both = logits.expand(2, -1).clone()
    both[:, 7] = 50.0  # the end-of-text token
    rows = [row(temperature=0.0, min_tokens=3, logit_bias=((11, 100.0),)), row(temperature=0.0)]
    assert sample(both, rows).tolist() == [11, 7]
    rows = [row(temperature=0.0, min_tokens=3), row(temperature=0.0, min_tokens=0)]
    first, second = sample(both, rows).tolist()
    assert first != 7
    assert second == 7


def test_logprobs_are_of_the_raw_distribution_with_rank_and_best(logits: torch.Tensor) -> None:
    truth = logits.log_softmax(-1)[0]
    order = truth.argsort(descending=True)
    found = logprobs_of(logits.expand(2, -1), torch.tensor([order[4], order[0]]), [3, 0])
    assert found[0].rank == 5
    assert found[0].logprob == pytest.approx(truth[order[4]].item())
    assert [token for token, _ in found[0].top] == order[:3].tolist()
    assert (found[1].rank, found[1].top) == (1, ())


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
def test_only_allowed_tokens_come_and_neighbours_are_as_alone(params: dict[str, Any]) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    for count in range(20):
        rows = [row(1, count, **params), row(2, count, allowed_token_ids=(4, 9), **params), row(3, count, **params)]
        tokens = sample(logits, rows)
        assert tokens[1] in (4, 9)
        alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in (0, 2)]
        assert [tokens[0], tokens[2]] == alone


def test_allowed_tokens_are_drawn_by_their_own_probabilities() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 9] = torch.log(torch.tensor(3.0))
    shares = draws(logits, 4000, allowed_token_ids=(4, 9))
    assert shares[4] == pytest.approx(0.25, abs=0.03)
    assert shares[9] == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_allowed_token_comes_even_if_all_of_them_are_forbidden(params: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    rows = [row(1, 0, allowed_token_ids=(4,), bad_words=((4,),), **params)]
    assert sample(logits, rows).tolist() == [4]


def test_last_token_of_a_bad_word_is_forbidden_once_the_others_stand_at_the_end() -> None:
    """The word may not begin in the prompt."""
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5] = 10.0
    logits[0, 6] = 5.0
    words = ((2, 3, 5), (7,))
    cases: dict[tuple[int, ...], int] = {(): 5, (3,): 5, (1, 2, 3): 6, (2, 3): 6, (2, 3, 1): 5, (2, 1, 3): 5}
    for output, expected in cases.items():
        made = row(temperature=0.0, bad_words=words, prompt=(2, 3), output=output, count=len(output))
        assert sample(logits, [made]).tolist() == [expected], output
    logits[0, 7] = 20.0
    assert sample(logits, [row(temperature=0.0, bad_words=words)]).tolist() == [5]
