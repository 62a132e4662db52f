"""Memory with real tensors: steps' peaks against their estimates, steps in parts, blocks on the host."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_serve.core.batch import (
    ActivationModel,
    Batch,
    BlockCopy,
    BlockMoves,
    MemoryLoad,
    Row,
    SampleInput,
    StepLoad,
    memory_load,
)
from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import ConfigError, DeviceMemoryError
from lora_serve.core.model_spec import LinearShape, ModelSpec
from lora_serve.core.request import SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.engine.step_cost import StepCost
from lora_serve.model.kv_cache import KVCache, KVShape
from lora_serve.model.memory_setup import DeviceFacts, MemoryShares, largest_step, limit_of, share_out
from lora_serve.model.runner.graphs import captured_load
from lora_serve.model.system.device_memory import free_memory, is_out_of_memory, peak_bytes, peak_meter
from lora_serve.model.system.process import return_freed_memory
from tests.local_engine import LocalEngine
from tests.model.tiny import CPU, filled_cache
from tests.oracle import save_adapter, save_tiny_model

SAMPLED = SampleInput(SamplingParams(temperature=0.8, top_p=0.9), 0, 0, ())


# -- what the machine says -------------------------------------------------------------------------------------


def test_peak_counts_what_lived_together_and_not_what_came_after() -> None:
    def call() -> None:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(3000, dtype=torch.uint8)
        del first, second
        torch.empty(3500, dtype=torch.uint8)

    assert peak_bytes(CPU, call) == 4000


def test_process_growth_is_seen() -> None:
    return_freed_memory()  # of tests before, which this one would not have to ask the system for
    meter = peak_meter(CPU, 1000)
    torch.ones(2**27, dtype=torch.uint8)
    assert 2**27 * 0.9 < meter() < 2**27 * 1.5
    assert free_memory(CPU) > 2**20


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_lack_of_memory_is_told_from_other_failures(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_the_cpu_allocators_own_words_are_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


# -- sharing out -----------------------------------------------------------------------------------------------

SPEC = ModelSpec("m", "M", 100, 64, (0,), 2, {"q": LinearShape(10, 10)}, 1000, "float32", "cpu")
MODEL = ActivationModel(100, per_token=10, per_logit=5, per_decode_key=1, per_chunk_key=2, per_score=0.25)


def shares(
    limit: int,
    *,
    is_cuda: bool = False,
    adapter_bytes: int | None = None,
    captured: MemoryLoad | None = None,
    **settings: Any,
) -> MemoryShares:
    config = Settings(model="m", max_num_seqs=4, max_num_batched_tokens=16, block_size=16, **settings).part(
        EngineConfig
    )
    facts = DeviceFacts(is_cuda, limit, limit - SPEC.num_bytes, block_bytes=(500,))
    return share_out(facts, SPEC, config, MODEL, 2, adapter_bytes, captured)


def test_kv_blocks_leave_room_for_weights_adapters_and_the_largest_step() -> None:
    config = Settings(model="m", max_num_seqs=4, max_num_batched_tokens=16).part(EngineConfig)
    step = MODEL.num_bytes(largest_step(SPEC, config))
    assert step == 100 + 16 * 10 + 4 * 5 + 64 * 2 + 16 * 64 // 4
    found = shares(1000 + step + 700 + 5 * 516, adapter_bytes=700, kv_cache_memory=10**6)
    assert (found.num_blocks, found.adapter_bytes) == ((5,), 700)
    assert shares(10**9, kv_cache_memory=10**6).num_blocks == (16,), "no more than all rows can fill"
    assert shares(10**9, kv_cache_memory=2500).num_blocks == (5,)


def test_captured_steps_have_their_memory_but_no_more_than_a_tenth() -> None:
    captured = captured_load(4, 64, 16)
    assert captured == MemoryLoad(4 + 512, 4 + 64, 4, 4, 64)
    without, with_graphs = (shares(10**5, captured=one, kv_cache_memory=10**6) for one in (None, captured))
    assert without.num_blocks == with_graphs.num_blocks == (16,)
    step = MODEL.num_bytes(MemoryLoad(16, 4, 4, longest_chunk=64, num_scores=16 * 64))
    limit = 1000 + step + 12 * 516
    taken = min(MODEL.num_bytes(captured), limit // 10)
    assert taken == limit // 10
    found = shares(limit, captured=captured, kv_cache_memory=10**6)
    assert found.num_blocks == ((12 * 516 - taken) // 516,) == (10,)
    assert MODEL.num_bytes(captured) == 100 + 516 * 10 + 68 * 5 + 4 * 64


@pytest.mark.parametrize(
    ("settings", "gpu_bytes", "limit"),
    [
        ({}, 1000, 500),
        ({"gpu_memory_utilization": 0.9}, 1000, 900),
        ({"gpu_memory_utilization": 0.9}, None, 500),
        ({"gpu_memory_utilization": 0.9, "memory_limit": 300}, 1000, 300),
    ],
)
def test_limit_is_a_number_of_bytes_or_a_part_of_a_gpu(
    settings: dict[str, Any], gpu_bytes: int | None, limit: int
) -> None:
    config = SimpleNamespace(**{"gpu_memory_utilization": None, "memory_limit": None, **settings})
    assert limit_of(config, gpu_bytes, 500) == limit  # type: ignore[arg-type]


def test_limit_that_holds_no_sequence_of_full_length_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"--memory-limit: of 3000 bytes.*--max-model-len 64 needs 2064"):
        shares(3000, kv_cache_memory=10**6)


def test_adapters_get_a_budget_where_memory_is_bounded() -> None:
    assert shares(10**6).adapter_bytes is None
    assert shares(10**6, is_cuda=True).adapter_bytes == 2 * 16 * 20 * 4
    assert shares(10**6, memory_limit=10**6).adapter_bytes == 2 * 16 * 20 * 4
    assert shares(10**6, is_cuda=True, adapter_bytes=7).adapter_bytes == 7


def test_swap_space_is_for_gpus_unless_asked_for() -> None:
    assert shares(10**6).num_host_blocks == (0,)
    assert shares(10**6, swap_space=5400).num_host_blocks == (10,)
    assert shares(10**6, is_cuda=True).num_host_blocks == (4 * 2**30 // 500,)


# -- estimates -------------------------------------------------------------------------------------------------


def row(sequence_id: int, count: int, keys: int, targets: bool = False) -> Row:
    """All rows share one table: what they answer does not matter here."""
    tokens = tuple((7 * sequence_id + i) % 90 for i in range(count))
    table = tuple(range(1, 1 + -(-keys // 16)))
    return Row(sequence_id, tokens, keys - count, table, (), SAMPLED, tokens if targets else None)


SHAPES = {
    "one token": [(1, 1)],
    "decode": [(1, 30)] * 16,
    "decode, uneven": [(1, 120), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2)],
    "prompt": [(100, 100)],
    "prompts": [(30, 30)] * 6,
    "late chunk": [(40, 120)],
    "mixed": [(1, 90), (1, 12), (50, 50), (20, 110)],
}


@pytest.mark.many(2)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_no_step_takes_more_than_its_estimate(architecture: str, tmp_path: Path) -> None:
    engine = LocalEngine(save_tiny_model(architecture, tmp_path), max_model_len=128, max_num_seqs=16)
    model = engine.parts.memory.activations
    for name, shape in SHAPES.items():
        for targets in (False, True):
            rows = tuple(row(i, *lengths, targets=targets) for i, lengths in enumerate(shape))
            engine.parts.runner.run(Batch(rows, ()))
            measured = peak_bytes(CPU, lambda rows=rows: engine.parts.runner.run(Batch(rows, ())))  # type: ignore[misc]
            estimate = model.num_bytes(memory_load(rows))
            assert measured <= estimate, (name, targets)
            assert estimate <= 12 * measured, "an estimate far off would keep the device idle"


def test_figures_of_memory_are_told(tmp_path: Path) -> None:
    engine = LocalEngine(save_tiny_model("llama", tmp_path), memory_limit="64MiB", max_num_seqs=4)
    engine.run([engine.request([5, 6, 7])])
    memory = engine.engine.stats().memory
    assert memory.limit == 64 * 2**20
    assert memory.weights == engine.parts.spec.num_bytes
    assert memory.kv == engine.parts.num_blocks * engine.parts.runner._cache.shape.block_bytes(16)
    assert 0 < memory.activations < memory.largest - memory.weights - memory.kv + 1
    assert memory.largest <= memory.limit
    assert memory.measured_peak > 0


def test_limit_below_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--memory-limit"):
        LocalEngine(save_tiny_model("llama", tmp_path), memory_limit="100KiB")


# -- out of memory ---------------------------------------------------------------------------------------------


def answers(engine: LocalEngine) -> list[tuple[list[int], list[float]]]:
    prompts = [list(range(10, 10 + length)) for length in (3, 40, 11, 25)]
    requests = [
        engine.request(prompt, "a" if i % 2 else None, logprobs=0, prompt_logprobs=0 if i == 3 else None)
        for i, prompt in enumerate(prompts)
    ]
    found = engine.run(requests)
    assert not [answer.error for answer in found if answer.error is not None]
    return [(a.token_ids, [p.logprob for p in [*(a.prompt_logprobs or ()), *a.logprobs] if p]) for a in found]


def test_answers_are_the_same_when_large_steps_run_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    adapters = {"a": save_adapter(model, tmp_path / "a")}
    truth = answers(LocalEngine(model, adapters))
    engine = LocalEngine(model, adapters)
    logits = engine.parts.runner._model.logits

    def short_of_memory(step: Any) -> torch.Tensor:
        found = logits(step)  # K and V are written before it fails
        if step.token_ids.numel() > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    monkeypatch.setattr(engine.parts.runner._model, "logits", short_of_memory)
    for (tokens, logprobs), (true_tokens, true_logprobs) in zip(answers(engine), truth, strict=True):
        assert tokens == true_tokens
        assert logprobs == pytest.approx(true_logprobs, abs=1e-4)
    memory = engine.engine.stats().memory
    assert memory.num_out_of_memory > 0
    assert engine.engine.stats().num_free_blocks == engine.parts.num_blocks


def test_runner_names_a_lack_of_memory_and_holds_nothing_of_the_failed_step(tmp_path: Path) -> None:
    engine = LocalEngine(save_tiny_model("llama", tmp_path))
    runner, model = engine.parts.runner, engine.parts.runner._model

    def fail(step: Any) -> torch.Tensor:
        torch.empty(2**60, dtype=torch.uint8)
        raise AssertionError

    runner._model = type("Short", (), {"spec": model.spec, "logits": staticmethod(fail)})()  # type: ignore[assignment]
    with pytest.raises(DeviceMemoryError) as caught:
        runner.run(Batch((row(0, 3, 3),), ()))
    assert caught.value.__context__ is None, "the first error's traceback would keep the step's tensors"


# -- blocks on the host ----------------------------------------------------------------------------------------


def test_blocks_come_back_as_they_left_whoever_used_their_places_meanwhile() -> None:
    cache = KVCache(KVShape.alike(2, 1, 4, torch.float32), 6, 4, CPU)
    cache.resize(6, 2)
    cache._pools[0].copy_(torch.randn(cache._pools[0].shape))
    first, second = cache._pools[0][:, :, 1].clone(), cache._pools[0][:, :, 4].clone()
    cache.move(BlockMoves(out=(BlockCopy(1, 0), BlockCopy(4, 1))))
    cache.zero([1, 4])
    assert not cache._pools[0][:, :, 1].any()
    cache.move(BlockMoves(back=(BlockCopy(2, 0), BlockCopy(1, 1))))
    assert torch.equal(cache._pools[0][:, :, 2], first)
    assert torch.equal(cache._pools[0][:, :, 1], second)


def test_a_place_that_is_left_and_taken_in_one_move_is_left_first() -> None:
    cache = filled_cache(4, 4, 1, 4)
    cache.resize(4, 1)
    cache._pools[0].copy_(torch.randn(cache._pools[0].shape))
    before = cache._pools[0][:, :, 1].clone()
    cache.move(BlockMoves((BlockCopy(1, 0),), (BlockCopy(1, 0),)))
    assert torch.equal(cache._pools[0][:, :, 1], before)


class Slow(StepCost):
    """Computing again is never cheaper."""

    def observe(self, load: StepLoad, seconds: float) -> None:
        pass

    @property
    def seconds_per_token(self) -> float:
        return 1e6


@pytest.mark.crossed
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "llama, int8"])
def test_swapped_rows_answer_as_those_never_preempted(architecture: str, caching: bool, tmp_path: Path) -> None:
    architecture, _, stored = architecture.partition(", ")
    wide = {"sliding_window": 24} if architecture == "mistral" else {}  # rows of its own one would lack no blocks
    model = save_tiny_model(architecture, tmp_path / "model", **wide)
    adapters = {"a": save_adapter(model, tmp_path / "a")}
    limits = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "enable_prefix_caching": caching}
    limits["kv_cache_dtype"] = stored or "auto"
    limits["speculate"] = "off"  # rows that end early leave memory
    roomy = LocalEngine(model, adapters, **limits)
    block_bytes = roomy.parts.runner._cache.shape.block_bytes(4)
    tight = LocalEngine(model, adapters, **limits, kv_cache_memory=20 * block_bytes, swap_space=64 * block_bytes)
    tight.engine.scheduler.swapping._cost = Slow()

    def run(engine: LocalEngine) -> list[tuple[list[int], list[float]]]:
        requests = [
            engine.request([10 + i] * 9, "a" if i % 2 else None, max_tokens=30, ignore_eos=True, logprobs=0)
            for i in range(4)
        ]
        requests[1] = replace(requests[1], sampling=replace(requests[1].sampling, temperature=0.9, seed=7))
        return [(a.token_ids, [p.logprob for p in a.logprobs if p]) for a in engine.run(requests)]

    truth, found = run(roomy), run(tight)
    swap = tight.engine.stats().swap
    assert swap.num_swapped > 0
    assert swap.num_recomputed == swap.num_used == 0
    assert roomy.engine.stats().num_preemptions == 0
    for (tokens, logprobs), (true_tokens, true_logprobs) in zip(found, truth, strict=True):
        assert tokens == true_tokens
        assert logprobs == pytest.approx(true_logprobs, abs=1e-4)


def test_a_row_that_reads_what_was_not_copied_back_would_answer_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the test above can fail."""
    model = save_tiny_model("llama", tmp_path)
    limits = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
    found: list[list[list[int]]] = []
    for is_broken in (False, True):
        engine = LocalEngine(model, **limits, kv_cache_memory="20KiB", swap_space="1MiB")
        engine.engine.scheduler.swapping._cost = Slow()
        if is_broken:
            monkeypatch.setattr(engine.parts.runner._cache, "move", lambda moves: None)
        requests = [engine.request([10 + i] * 9, max_tokens=30, ignore_eos=True) for i in range(4)]
        found.append([answer.token_ids for answer in engine.run(requests)])
        assert engine.engine.stats().swap.num_swapped > 0
    assert found[0] != found[1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_pool_takes_no_memory_before_its_blocks_are_used_and_is_all_zeros() -> None:
    before = resident_bytes()
    cache = KVCache(KVShape.alike(2, 4, 64, torch.bfloat16), 2**12, 16, CPU)  # 128 MiB
    assert resident_bytes() - before < 2**24
    assert not any(bool(part.any()) for part in cache.layer(1))
    keys, _ = cache.layer(0)
    keys[7] = 1.0
    assert keys[7].sum() == 16 * 4 * 64
    assert not cache.layer(0)[0][6].any()
