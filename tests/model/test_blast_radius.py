"""Whatever goes wrong in one row of a real model's step ends that row; the others' tokens are what they are alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.errors import DeviceMemoryError, InternalError, InvalidRequestError, NumericalError
from tests.local_engine import Answer, LocalEngine
from tests.oracle import save_adapter, save_tiny_model

NUM_ROWS = 4
PROMPTS = [[3, 5, 7, index] for index in range(NUM_ROWS)]
BAD = 29  # a token that only the row at fault holds


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    root = tmp_path_factory.mktemp("blast")
    model = save_tiny_model("llama", root / "model")
    adapters = {"a": save_adapter(model, root / "a", seed=1, r=4, lora_alpha=8)}
    return LocalEngine(model, adapters, block_size=4, kv_cache_memory="200KiB", enable_prefix_caching=False)


@pytest.fixture(scope="module")
def expected(engine: LocalEngine) -> list[list[int]]:
    return [
        engine.run([engine.request(prompt, name)])[0].token_ids for prompt, name in zip(PROMPTS, names(), strict=True)
    ]


def names() -> list[str | None]:
    return [None, "a"] * (NUM_ROWS // 2)


def run_beside(engine: LocalEngine, bad: Any) -> tuple[Answer, list[list[int]]]:
    """What became of the row at fault, and the tokens of the others."""
    rows = [engine.request(prompt, name) for prompt, name in zip(PROMPTS, names(), strict=True)]
    found = engine.run([*rows[:2], bad, *rows[2:]])
    stats = engine.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert all(slot.num_rows == 0 for slot in stats.slots)
    return found.pop(2), [answer.token_ids for answer in found]


@contextmanager
def layer_output(engine: LocalEngine, change: Any) -> Iterator[None]:
    """`change(hidden, token_ids)` on what the embedding gives, [tokens, hidden], wherever the model runs eagerly."""
    base = engine.parts.runner._model  # type: ignore[union-attr]
    module = base.module.get_submodule(engine.parts.spec.input_embedding)
    handle = module.register_forward_hook(lambda _, inputs, output: change(output, inputs[0]))
    try:
        yield
    finally:
        handle.remove()


def test_numbers_that_are_none_in_one_rows_layer_end_that_row(engine: LocalEngine, expected: list[list[int]]) -> None:
    def spoil(output: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.where((token_ids == BAD)[..., None], torch.nan, output)

    with layer_output(engine, spoil):
        ended, others = run_beside(engine, engine.request([3, BAD, 5]))
    assert isinstance(ended.error, NumericalError)
    assert others == expected


def test_an_exception_that_one_row_causes_ends_that_row(engine: LocalEngine, expected: list[list[int]]) -> None:
    def explode(output: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        if (token_ids == BAD).any():
            raise RuntimeError("a kernel failed")
        return output

    with layer_output(engine, explode):
        ended, others = run_beside(engine, engine.request([3, BAD, 5]))
    assert isinstance(ended.error, InternalError)
    assert others == expected


@pytest.mark.parametrize("token", [10**6, -1, 2**40])
@pytest.mark.parametrize("name", [None, "a"])
def test_a_token_beyond_the_vocabulary_ends_its_row(
    engine: LocalEngine, expected: list[list[int]], token: int, name: str | None
) -> None:
    ended, others = run_beside(engine, engine.request([3, token, 5], name))
    assert isinstance(ended.error, InvalidRequestError)
    assert others == expected


@pytest.mark.parametrize("wrong", ["generation", "index"])
def test_a_row_with_anothers_slot_ends(
    engine: LocalEngine, expected: list[list[int]], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.parts.runner.run

    def confused(batch: Batch) -> list[RowOutput]:
        rows = []
        for row in batch.rows:
            if BAD in row.token_ids:
                slot = row.adapters[0].slot
                slot = replace(slot, **{wrong: getattr(slot, wrong) + 1})
                row = replace(row, adapters=(replace(row.adapters[0], slot=slot),))
            rows.append(row)
        return run(replace(batch, rows=tuple(rows)))

    monkeypatch.setattr(engine.parts.runner, "run", confused)
    ended, others = run_beside(engine, engine.request([3, BAD, 5], "a"))
    assert isinstance(ended.error, InternalError)
    assert others == expected


def test_memory_that_only_one_row_lacks_ends_that_row(
    engine: LocalEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.parts.runner.run

    def short(batch: Batch) -> list[RowOutput]:
        if any(BAD in row.token_ids for row in batch.rows):
            raise DeviceMemoryError("no memory for the step")
        return run(batch)

    monkeypatch.setattr(engine.parts.runner, "run", short)
    ended, others = run_beside(engine, engine.request([3, BAD, 5]))
    assert isinstance(ended.error, DeviceMemoryError)
    assert others == expected


def test_memory_that_an_allocation_lacks_ends_nobody(
    engine: LocalEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch raises it on the CPU, in the middle of a step of many rows."""
    runner = engine.parts.runner
    run = runner._run  # type: ignore[union-attr]

    def short(batch: Batch) -> list[RowOutput]:
        if len(batch.rows) > 2:
            torch.empty(2**62, dtype=torch.uint8)
        return run(batch)

    monkeypatch.setattr(runner, "_run", short)
    ended, others = run_beside(engine, engine.request([3, BAD, 5]))
    assert ended.error is None
    assert others == expected
