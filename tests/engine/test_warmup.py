"""The warm-up plan: the shapes that it says are the shapes that run."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from lora_serve.core.batch import Batch, Row
from lora_serve.core.config import EngineConfig
from lora_serve.core.model_spec import ModelSpec, PoolingSpec
from lora_serve.core.request import PoolingParams, SamplingParams, Task
from lora_serve.engine.warmup import (
    ANY_TEXT,
    WarmupStage,
    generating_shapes,
    grammar_stage,
    pooling_shapes,
    warmup_stages,
)
from tests.engine.fake_constraints import FakeConstraints
from tests.engine.world import EOS, World, adapter

DUMMY = adapter("warm-up")
SHORT_SEGMENT = 64  # tokens, of model/step_context.py, which needs torch


def spec(max_model_len: int = 512, pooling: PoolingSpec | None = None, device: str = "cpu") -> ModelSpec:
    return ModelSpec("fake", "Fake", 2000, max_model_len, (EOS,), 1, {}, 0, "float32", device, pooling=pooling)


def run(mode: str, **settings: Any) -> tuple[World, list[Batch]]:
    """The batches that the plan's stages make of an engine with these settings."""
    max_model_len, device = settings.pop("max_model_len", 512), settings.pop("device", "cpu")
    world = World(num_blocks=2048, max_model_len=max_model_len, **settings)
    for stage in warmup_stages(mode, spec(max_model_len, device=device), world.settings.part(EngineConfig), DUMMY):
        for request in stage.requests:
            world.take(world.scheduler.add(request))
            world.tokens[request.request_id] = []
            world.runner.tenants[world.scheduler._by_request[request.request_id].sequence_id] = request.tenant
        world.run()
        assert not world.scheduler._by_request
    return world, world.runner.batches


def decoding(batch: Batch) -> int:
    return sum(row.start > 0 and len(row.token_ids) == 1 for row in batch.rows)


def prompt_rows(batches: list[Batch]) -> Iterator[Row]:
    return (row for batch in batches for row in batch.rows if len(row.token_ids) > 1)


LIMITS = {"max_num_seqs": 24, "max_num_batched_tokens": 96}


def test_full_decodes_every_power_of_two_of_rows_with_and_without_lora() -> None:
    _, batches = run("full", **LIMITS)
    for has_adapter in (False, True):
        found = {decoding(b) for b in batches if decoding(b) == len(b.rows) and (b.num_adapters > 0) is has_adapter}
        assert {1, 2, 4, 8, 16, 24} <= found


def test_full_runs_chunks_of_every_power_of_two_with_and_without_lora() -> None:
    _, batches = run("full", **LIMITS)
    for has_adapter in (False, True):
        found = {len(row.token_ids) for row in prompt_rows(batches) if bool(row.adapters) is has_adapter}
        assert {4, 8, 16, 32, 64, 96} <= found


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_short_and_long_segments_of_an_adapter_run_so_that_both_kernels_of_a_gpu_do(mode: str) -> None:
    _, batches = run(mode, device="cuda", **LIMITS)
    lengths = [len(row.token_ids) for row in prompt_rows(batches) if row.adapters]
    assert min(lengths) <= SHORT_SEGMENT < max(lengths)
    assert any(len(row.token_ids) == 1 and row.adapters for batch in batches for row in batch.rows)


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_largest_batches_and_chunks_beside_decoding_rows_run(mode: str) -> None:
    _, batches = run(mode, prompt_stretch=0, device="cuda", **LIMITS)
    assert max(decoding(batch) for batch in batches) == 24
    assert max(batch.num_tokens for batch in batches) == 96
    assert any(0 < decoding(batch) < len(batch.rows) and batch.num_tokens == 96 for batch in batches)


def test_auto_on_a_cpu_runs_no_long_prompts_and_few_rows() -> None:
    _, batches = run("auto", prompt_stretch=0, max_num_seqs=64, max_num_batched_tokens=512)
    assert max(len(row.token_ids) for row in prompt_rows(batches)) == 40
    assert max(map(decoding, batches)) == 16
    assert sum(batch.num_tokens for batch in batches) < 400


def test_as_many_rows_as_a_step_has_tokens_decode_together() -> None:
    _, batches = run("auto", max_num_seqs=16, max_num_batched_tokens=16)
    assert max(decoding(batch) for batch in batches) == 16


def test_full_runs_a_chunk_that_follows_another() -> None:
    _, batches = run("full", **LIMITS)
    assert any(row.start >= 96 for row in prompt_rows(batches))


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_every_way_of_sampling_runs(mode: str) -> None:
    _, batches = run(mode, **LIMITS)
    params = [row.sample.params for batch in batches for row in batch.rows if row.sample is not None]
    changed = {
        name
        for used in params
        for name in SamplingParams.__dataclass_fields__
        if getattr(used, name) != getattr(SamplingParams(), name)
    }
    assert changed == set(SamplingParams.__dataclass_fields__)


def test_auto_is_a_small_part_of_full() -> None:
    auto, full = run("auto", **LIMITS)[1], run("full", **LIMITS)[1]
    assert len(auto) < len(full) / 2
    off = pickle.loads(pickle.dumps("off"))  # as a fleet's replica is told
    assert warmup_stages(off, spec(), World().settings.part(EngineConfig), DUMMY) == []


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_longer_prompts_decode_once(mode: str) -> None:
    """A second step of theirs would be like the first, and only start the server later."""
    world, _ = run(mode, **LIMITS)
    for stage in warmup_stages(mode, spec(), world.settings.part(EngineConfig), DUMMY):
        longest = max(len(request.prompt_token_ids) for request in stage.requests)
        assert longest == 2 or {len(world.tokens[request.request_id]) for request in stage.requests} == {2}


@pytest.mark.parametrize("mode", ["auto", "full"])
@pytest.mark.parametrize("max_model_len", [8, 20, 97])
@pytest.mark.parametrize("settings", [{"max_num_seqs": 1}, {"max_num_seqs": 16, "max_num_batched_tokens": 16}])
def test_plan_fits_any_limits(mode: str, max_model_len: int, settings: dict[str, int]) -> None:
    world, batches = run(mode, max_model_len=max_model_len, **settings)
    assert batches
    world.check_nothing_held()


def config(**settings: Any) -> EngineConfig:
    return World(**settings).settings.part(EngineConfig)


def names(stages: list[WarmupStage]) -> list[str]:
    return [request.request_id for stage in stages for request in stage.requests]


def test_each_shape_occurs_once_and_each_request_has_its_own_id() -> None:
    for mode in ("auto", "full"):
        shapes = generating_shapes(mode, spec(), config(**LIMITS))
        assert len(set(shapes)) == len(shapes)
        found = names(warmup_stages(mode, spec(), config(**LIMITS), DUMMY))
        assert len(set(found)) == len(found)


def test_pooling_models_run_single_texts_and_full_batches_of_every_padded_length() -> None:
    pooling = PoolingSpec(Task.EMBED, 8, is_ragged=False, takes_pairs=True)
    model, limits = spec(100, pooling), config(max_num_seqs=8, max_num_batched_tokens=128)
    shapes = {(shape.num_rows, shape.num_tokens) for shape in pooling_shapes("full", model, limits)}
    assert {(1, 16), (8, 16), (4, 32), (2, 64), (1, 100)} <= shapes
    requests = [request for stage in warmup_stages("full", model, limits, DUMMY) for request in stage.requests]
    assert all(request.pooling is not None for request in requests)
    types = [(request.pooling or PoolingParams()).token_type_ids for request in requests]
    assert [len(given) for given in types] == [len(request.prompt_token_ids) for request in requests]
    assert len(warmup_stages("auto", model, limits, DUMMY)) < len(warmup_stages("full", model, limits, DUMMY))


def test_classifier_without_labels_of_its_own_is_not_run() -> None:
    model = spec(100, PoolingSpec(Task.CLASSIFY, 0))
    assert warmup_stages("full", model, config(), DUMMY) == []
    assert warmup_stages("full", spec(100, PoolingSpec(Task.CLASSIFY, 0, ("yes", "no"))), config(), DUMMY)


def test_grammar_s_row_is_an_ordinary_one() -> None:
    world = World(constraints=FakeConstraints())
    (request,) = grammar_stage(spec(), DUMMY).requests
    assert request.grammar == ANY_TEXT
    world.take(world.scheduler.add(request))
    assert list(world.constraints.compiling) == [request.request_id]
