"""Whole steps on CUDA: graphs give what the ordinary way gives, nothing waits twice, memory that is short is no end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, Row, SampleInput, SlotRef
from lora_serve.core.errors import DeviceMemoryError
from lora_serve.core.model_spec import LinearShape
from lora_serve.core.request import SamplingParams
from lora_serve.model.lora.host_adapter import in_arena
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots, copy_stream
from lora_serve.model.system.device_memory import to_device, to_host, within_memory
from tests.contracts.test_lora_kernel import expected, tokens_of
from tests.local_engine import Answer, LocalEngine
from tests.model.tiny import MODULE, random_adapter
from tests.oracle import save_adapter, save_tiny_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPE = LinearShape(24, 40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("gpu")
    model = save_tiny_model("llama", root / "model")
    return model, {name: save_adapter(model, root / name, seed=i) for i, name in enumerate("abcd")}


def answers(folders: tuple[Path, dict[str, Path]], **settings: Any) -> list[Answer]:
    """Ten requests of four adapters and the base over three slots, some sampled, some with log-probabilities."""
    engine = LocalEngine(*folders, max_loras=3, kv_cache_memory="4MiB", swap_space="1MiB", **settings)
    names = ["a", None, "b", "c", "a", "d", None, "b", "a", "d"]
    sampled = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    return engine.run(
        [
            engine.request(list(range(3, 6 + i)), name, max_tokens=12, **(sampled if i % 3 == 0 else {"logprobs": 2}))
            for i, name in enumerate(names)
        ]
    )


def test_graphs_on_and_off_and_the_cpu_say_the_same(folders: tuple[Path, dict[str, Path]]) -> None:
    on_cpu = answers(folders, device="cpu")
    for graphs in (True, False):
        found = answers(folders, device="cuda", dtype="float32", cuda_graphs=graphs)
        assert [answer.error for answer in found] == [None] * len(found)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in on_cpu]


def test_steps_launched_ahead_say_what_steps_that_are_waited_for_say(
    folders: tuple[Path, dict[str, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    """Of rows that graphs draw: greedy, and of each kind of sampling."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}, {"temperature": 1.0, "top_k": 9}
    ]  # fmt: skip
    found = []
    for is_ahead in (True, False):
        engine = LocalEngine(
            *folders, device="cuda", dtype="float32", kv_cache_memory="4MiB", swap_space="1MiB", speculate="off",
            launch_ahead=is_ahead,
        )  # fmt: skip
        assert (engine.parts.launcher is not None) == is_ahead
        requests = [
            engine.request(list(range(3, 6 + i)), name, max_tokens=12 + 3 * i, seed=i, **kinds[i % 4])
            for i, name in enumerate(["a", None, "b", "c", "a", "d", None, "b"])
        ]
        found.append([(answer.token_ids, answer.error) for answer in engine.run(requests)])
        assert engine.engine.execution.flights.is_possible == is_ahead
    assert found[0] == found[1]
    assert "not drawn by a graph" not in caplog.text


def test_steps_in_bfloat16_are_captured(folders: tuple[Path, dict[str, Path]]) -> None:
    engine = LocalEngine(*folders, device="cuda", dtype="bfloat16", kv_cache_memory="4MiB", swap_space="1MiB")
    engine.run([engine.request([5, 6, 7], name) for name in ("a", "b", None)])
    graphs = engine.parts.runner._graphs  # type: ignore[union-attr]
    assert graphs is not None
    assert {shape.num_long_tokens > 0 for shape in graphs._captured} == {True, False}  # prompts; decoding
    assert not graphs._failed


def test_graphs_are_captured_anew_after_an_adapter_of_a_greater_rank(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    adapters = {f"r{rank}": save_adapter(model, tmp_path / f"r{rank}", seed=rank, r=rank) for rank in (8, 16, 100)}
    engine = LocalEngine(
        model, adapters, device="cuda", dtype="float32", kv_cache_memory="4MiB", swap_space="1MiB",
        adapter_memory="4MiB",
    )  # fmt: skip
    graphs = engine.parts.runner._graphs  # type: ignore[union-attr]
    assert graphs is not None
    on_cpu = LocalEngine(model, adapters, device="cpu")
    for name, greatest in {"r8": 64, "r16": 64, "r100": 128}.items():
        answer, wanted = (one.run([one.request([5, 6, 7], name, ignore_eos=True)])[0] for one in (engine, on_cpu))
        assert answer.error is None
        assert answer.token_ids == wanted.token_ids
        assert not graphs._failed
        assert graphs._captured
        assert graphs._world[2] == greatest


@pytest.fixture
def no_waits() -> Iterator[None]:
    """torch raises where it makes the host wait; waiting for an event of one's own is none of that."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_step_waits_for_its_tokens_alone(
    folders: tuple[Path, dict[str, Path]], request: pytest.FixtureRequest
) -> None:
    engine = LocalEngine(*folders, device="cuda", kv_cache_memory="4MiB", swap_space="1MiB")
    sample = SampleInput(SamplingParams(temperature=0.8, top_p=0.9, logprobs=1), 0, 0, ())
    batch = Batch((Row(0, (9,), 0, (1,), (), sample, None), Row(1, (8,), 0, (2,), (), sample, None)), ())
    engine.parts.runner.run(batch)
    request.getfixturevalue("no_waits")
    assert all(output.error is None for output in engine.parts.runner.run(batch))


def test_adapters_are_copied_from_pinned_memory_beside_the_computation() -> None:
    linears = {MODULE: SHAPE, "other": SHAPE}
    slots = LoraSlots(linears, 2, CUDA, copy_stream(CUDA))
    kernel = create_kernel("triton", slots)
    work = torch.randn(4096, 4096, device=CUDA)
    for generation in range(20):
        host = in_arena(random_adapter("d", 7, SHAPE, torch.bfloat16), linears, pin=True)
        assert host.arena is not None
        assert host.arena.is_pinned()
        work = (work @ work).clamp(-1, 1)
        slots.load(SlotRef(1, generation, "d"), host)
        slots.check(SlotRef(1, generation, "d"))
        x, y = torch.randn(2, 24, device=CUDA), torch.zeros(2, 40, device=CUDA)
        kernel.add(y, x, (slots.module_index[MODULE],), tokens_of([(2, 1)]))
        wanted = expected(torch.zeros_like(y), x, slots, [(2, 1)])
        assert torch.allclose(y.double(), wanted, atol=2e-2, rtol=2e-2)


def test_slots_grow_while_copies_are_under_way() -> None:
    linears = {MODULE: SHAPE, "other": SHAPE}
    slots = LoraSlots(linears, 1, CUDA, copy_stream(CUDA))
    kernel = create_kernel("triton", slots)
    for index in range(9):
        slots.load(SlotRef(index, 1, "d"), in_arena(random_adapter("d", 3 + index, SHAPE), linears, pin=True))
    x, y = torch.randn(9, 24, device=CUDA), torch.zeros(9, 40, device=CUDA)
    for index in range(9):
        slots.check(SlotRef(index, 1, "d"))
    rows = [(1, index) for index in range(9)]
    kernel.add(y, x, (slots.module_index[MODULE],), tokens_of(rows))
    assert torch.allclose(y.double(), expected(torch.zeros_like(y), x, slots, rows), atol=1e-3)


def test_values_come_and_go_through_pinned_memory() -> None:
    moved = to_device([[1, 2], [3, 4]], torch.int64, CUDA)
    assert moved.is_cuda
    first, second = to_host(moved, moved.float() / 2)
    assert first.tolist() == [[1, 2], [3, 4]]
    assert second.is_pinned()
    assert second.tolist() == [[0.5, 1.0], [1.5, 2.0]]


def test_a_step_too_large_for_the_device_is_refused_and_the_next_one_runs() -> None:
    free = torch.cuda.mem_get_info(CUDA)[0]
    with pytest.raises(DeviceMemoryError):
        within_memory(CUDA, lambda: torch.empty(2 * free, dtype=torch.uint8, device=CUDA))
    assert within_memory(CUDA, lambda: torch.ones(3, device=CUDA).sum().item()) == 3.0
