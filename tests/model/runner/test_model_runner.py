"""One batch on a tiny model: a row is alone, blocks leave no residue, slots are checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_serve.core.batch import Batch, Row, RowAdapter, RowOutput, SampleInput, SlotRef
from lora_serve.core.errors import InternalError, NumericalError
from lora_serve.core.request import SamplingParams
from tests.loading import load_adapter
from tests.local_engine import LocalEngine
from tests.oracle import save_adapter, save_tiny_model

GREEDY = SampleInput(SamplingParams(temperature=0.0, logprobs=1), 0, 0, ())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    root = tmp_path_factory.mktemp("runner")
    model = save_tiny_model("llama", root / "model")
    adapters = {name: save_adapter(model, root / name, seed=i) for i, name in enumerate("ab")}
    return LocalEngine(model, adapters, block_size=4, max_loras=2, kv_cache_memory="100KiB")


def load(engine: LocalEngine, name: str, index: int, generation: int) -> SlotRef:
    ref = engine.refs[name]
    slot = SlotRef(index, generation, ref.digest)
    saved = load_adapter(engine._folders[name], ref, engine.parts.spec)
    engine.parts.runner.load_slot(slot, engine.parts.fold(saved))
    return slot


def row(sequence_id: int, tokens: tuple[int, ...], table: tuple[int, ...], slot: SlotRef | None = None) -> Row:
    adapters = () if slot is None else (RowAdapter(slot),)
    return Row(sequence_id, tokens, 0, table, adapters, GREEDY, None)


def run(engine: LocalEngine, *rows: Row) -> list[RowOutput]:
    blocks = tuple(block for item in rows for block in item.block_table)
    return engine.parts.runner.run(Batch(rows, blocks))


def test_outputs_come_in_the_batchs_order_whatever_the_lengths(engine: LocalEngine) -> None:
    slot = load(engine, "a", 0, 1)
    rows = [row(0, (5, 6, 7), (1,)), row(1, (9,), (2,), slot), row(2, (5, 6, 7, 8, 9), (3, 4), slot)]
    together = run(engine, *rows)
    assert [output.sequence_id for output in together] == [0, 1, 2]
    for item, output in zip(rows, together, strict=True):
        alone = run(engine, item)[0]
        assert alone.token_id == output.token_id
        assert alone.logprobs is not None
        assert output.logprobs is not None
        assert alone.logprobs.logprob == pytest.approx(output.logprobs.logprob, abs=1e-5)


def test_row_of_a_slot_that_changed_hands_is_refused_alone(engine: LocalEngine) -> None:
    old = load(engine, "a", 0, 1)
    new = load(engine, "b", 0, 2)
    outputs = run(engine, row(0, (5, 6), (1,), old), row(1, (5, 6), (2,), new), row(2, (5, 6), (3,)))
    assert isinstance(outputs[0].error, InternalError)
    assert outputs[0].token_id is None
    assert [output.error for output in outputs[1:]] == [None, None]


def test_row_that_is_not_a_number_ends_alone_and_its_blocks_leave_nothing(engine: LocalEngine) -> None:
    good = load(engine, "a", 0, 1)
    poisoned = load(engine, "b", 1, 1)
    clean = run(engine, row(0, (5, 6, 7), (1,), good), row(1, (8,), (2,)))
    slots = engine.parts.runner._slots
    weights = slots.delta(slots.module_index["model.layers.0.self_attn.v_proj"], 1)
    assert weights is not None
    weights.a.fill_(float("nan"))
    outputs = run(engine, row(0, (5, 6, 7), (1,), good), row(1, (8,), (2,)), row(2, (5, 6, 7), (3,), poisoned))
    assert isinstance(outputs[2].error, NumericalError)
    assert [output.token_id for output in outputs[:2]] == [output.token_id for output in clean]
    # block 3 now holds NaN behind position 0; its next owner must not see it
    after = run(engine, row(0, (5, 6, 7), (1,), good), row(1, (8,), (3,)))
    assert [output.token_id for output in after] == [output.token_id for output in clean]


def test_prompt_whose_logprobs_are_not_numbers_ends_alone(engine: LocalEngine) -> None:
    """Also in a chunk that is not the last: what comes after it may be numbers again, as with sliding windows."""
    poisoned = load(engine, "b", 1, 1)
    slots = engine.parts.runner._slots
    weights = slots.delta(slots.module_index["model.layers.0.self_attn.v_proj"], 1)
    assert weights is not None
    weights.a.fill_(float("nan"))
    scored = [
        replace(row(i, (5, 6, 7), (i + 1,), slot), sample=None, prompt_targets=(6, 7, 8), num_prompt_logprobs=1)
        for i, slot in enumerate((None, poisoned))
    ]
    good, bad = run(engine, *scored)
    assert isinstance(bad.error, NumericalError)
    assert (good.error, len(good.prompt_logprobs)) == (None, 3)


def test_a_chunk_that_is_not_the_last_samples_nothing(engine: LocalEngine) -> None:
    first = replace(row(0, (5, 6), (1,)), sample=None)
    assert run(engine, first) == [RowOutput(0, None)]


def test_prompt_logprobs_over_chunks_equal_those_in_one_piece(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    prompt = torch.randint(3, 97, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for budget in (128, 16):
        engine = LocalEngine(model, max_num_batched_tokens=budget, max_num_seqs=4)
        answer = engine.run([engine.request(prompt, prompt_logprobs=2, max_tokens=1)])[0]
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        assert len(answer.prompt_logprobs) == len(prompt)
        found.append([item.logprob for item in answer.prompt_logprobs[1:] if item is not None])
    assert found[0] == pytest.approx(found[1], abs=1e-4)
