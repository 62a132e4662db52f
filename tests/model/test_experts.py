"""Products grouped by expert: the formula in float64, the same bits alone and in company, nothing that waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lora_serve.model import expert_products, triton_experts
from lora_serve.model.expert_products import OPERATORS
from tests.model.recorded_call import RecordedCall, WatchedPrograms

NUM_EXPERTS = 6
CHOICES: dict[str, list[tuple[int, ...]]] = {  # the experts of each token
    "one token": [(4, 1)],
    "all to one expert": [(5,)] * 40,
    "experts without tokens": [*[(0, 3)] * 9, *[(3, 5)] * 12],
    "ragged": [tuple(torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(i))[:3]) for i in range(37)],
    "300 tokens": [(i % NUM_EXPERTS, (i * i + 1) % NUM_EXPERTS) for i in range(300)],
}


def products(x: Tensor, weight: Tensor, chosen: Sequence[Sequence[int]], per_row: int = 0) -> Tensor:
    """[pairs, out] by the operators. `per_row` 0: each token's row serves all its pairs."""
    index = torch.tensor(chosen, dtype=torch.int64)
    order, tiles = OPERATORS.sort_pairs(index.flatten(), len(weight))
    found: Tensor = OPERATORS.multiply_pairs(x, weight, order, tiles, per_row or index.shape[1])
    return found


@pytest.mark.parametrize("name", CHOICES)
def test_tiles_hold_each_pair_once_by_its_expert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_products, "_SORTED", 64)  # so that a program looks at its pairs in several parts
    flat = torch.tensor(CHOICES[name]).flatten()
    order, tiles = OPERATORS.sort_pairs(flat, NUM_EXPERTS)
    assert sorted(order.tolist()) == list(range(len(flat)))
    seen = []
    for first, count, expert in tiles.tolist():
        pairs = order[first : first + count].tolist()
        assert all(flat[pair] == expert for pair in pairs)
        assert pairs == sorted(pairs)
        seen += pairs
    assert sorted(seen) == list(range(len(flat)))
    if len(flat) <= len(tiles):
        assert not tiles[len(flat) :].any(), "these are not launched"


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHOICES)
def test_products_are_the_formula(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    chosen = CHOICES[name]
    x, weight = torch.randn(len(chosen), 150).to(dtype), (torch.randn(NUM_EXPERTS, 70, 150) / 12).to(dtype)
    pairs = [(token, expert) for token, own in enumerate(chosen) for expert in own]
    wanted = torch.stack([weight[expert].double() @ x[token].double() for token, expert in pairs])
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    found = products(x, weight, chosen)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(products(x, weight.mT.contiguous().mT, chosen), found), "weights that lie the other way round"
    rows = x[[token for token, _ in pairs]]
    assert torch.equal(products(rows, weight, chosen, per_row=1), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_numbers_are_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    chosen = CHOICES["300 tokens"][:70]
    x, weight = torch.randn(len(chosen), 150).to(dtype), torch.randn(NUM_EXPERTS, 24, 150).to(dtype)
    together = products(x, weight, chosen).view(len(chosen), 2, 24)
    for token in (0, 17, 18, 69):
        assert torch.equal(products(x[token : token + 1], weight, chosen[token : token + 1]), together[token])
    order = torch.randperm(len(chosen))
    shuffled = products(x[order], weight, [chosen[i] for i in order]).view(len(chosen), 2, 24)
    assert torch.equal(shuffled, together[order])


def test_a_token_that_is_not_a_number_stays_alone() -> None:
    torch.manual_seed(0)
    chosen = CHOICES["ragged"]
    x, weight = torch.randn(len(chosen), 32), torch.randn(NUM_EXPERTS, 16, 32)
    clean = products(x, weight, chosen).view(len(chosen), 3, 16)
    x[7] = torch.nan
    found = products(x, weight, chosen).view(len(chosen), 3, 16)
    assert found[7].isnan().all()
    others = [i for i in range(len(chosen)) if i != 7]
    assert torch.equal(found[others], clean[others])


def test_nothing_waits_and_a_replay_follows_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the operators too, which the recorder takes for one step each."""
    torch.manual_seed(0)
    log: list[RecordedCall] = []
    monkeypatch.setattr(expert_products, "_programs", lambda: WatchedPrograms(triton_experts, log))
    recorder = RecordedCall(log)
    index, weight = torch.tensor(CHOICES["ragged"]), torch.randn(NUM_EXPERTS, 16, 32)
    x = torch.randn(len(index), 32)

    def compute() -> Tensor:
        order, tiles = expert_products._sort_pairs(index.flatten(), NUM_EXPERTS)
        return expert_products._multiply_pairs(x, weight, order, tiles, 3)

    out = recorder.capture(compute)
    index.copy_(torch.tensor([(5, 4, 0)] * len(index)))
    x.normal_()
    recorder.replay()
    assert torch.equal(out, products(x, weight, index.tolist()))
