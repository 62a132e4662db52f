"""Point 7: what a row is sampled with goes with the row, wherever it stands in a batch and whoever comes or leaves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.local_engine import LocalEngine
from tests.oracle import save_adapter, save_tiny_model

# Each has state of its own that would be seen in another's row: seeds, penalties over its own tokens, bias, ends.
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7, "max_tokens": 12},
    {"temperature": 1.0, "seed": 8, "max_tokens": 5},
    {"temperature": 1.3, "seed": 7, "top_k": 5, "max_tokens": 9},
    {"temperature": 0.0, "logit_bias": ((11, 100.0),), "max_tokens": 4},
    {"temperature": 0.0, "logit_bias": ((13, 100.0),), "max_tokens": 10},
    {"temperature": 0.0, "repetition_penalty": 1.8, "max_tokens": 12},
    {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 1.0, "max_tokens": 12},
    {"temperature": 0.9, "seed": 3, "top_p": 0.5, "min_p": 0.1, "max_tokens": 7},
    {"temperature": 0.0, "max_tokens": 12},
    {"temperature": 0.0, "max_tokens": 12, "logprobs": 3},
]
PROMPTS = [[3 + (7 * index + step) % 40 for step in range(2 + 5 * index % 13)] for index in range(len(SAMPLINGS))]
ADAPTERS = [None, "a", "b", {"a": 0.5, "b": 0.5}]


@pytest.fixture(scope="module", params=["ample", "so tight that rows are set back"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    root = tmp_path_factory.mktemp("rows")
    model = save_tiny_model("llama", root / "model")
    adapters = {name: save_adapter(model, root / name, seed=seed) for seed, name in enumerate("ab")}
    memory = "200KiB" if request.param == "ample" else "34KiB"
    return LocalEngine(
        model, adapters, block_size=4, max_loras=2, kv_cache_memory=memory, max_num_seqs=4, max_model_len=40,
        enable_prefix_caching=False,
    )  # fmt: skip


def requests_of(engine: LocalEngine, order: list[int]) -> list[Any]:
    return [engine.request(PROMPTS[i], ADAPTERS[i % len(ADAPTERS)], **SAMPLINGS[i]) for i in order]


def test_rows_answer_in_any_order_and_company_as_they_do_alone(engine: LocalEngine) -> None:
    numbers = list(range(len(SAMPLINGS)))
    alone = [engine.run(requests_of(engine, [number]))[0].token_ids for number in numbers]
    assert len({tuple(tokens) for tokens in alone}) == len(alone), "an answer in another's place would not be seen"
    shuffled = [random.Random(seed).sample(numbers, len(numbers)) for seed in range(4)]
    for order in (numbers, numbers[::-1], *shuffled):
        together = engine.run(requests_of(engine, order))
        assert {number: answer.token_ids for number, answer in zip(order, together, strict=True)} == dict(
            enumerate(alone)
        )
