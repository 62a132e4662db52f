"""Captured steps give what the ordinary way gives, whatever the rows, slots and sizes of later steps are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from lora_serve.core.batch import ActivationModel, Batch, NextToken, Row, RowAdapter, RowOutput, SampleInput, SlotRef
from lora_serve.core.request import SamplingParams
from lora_serve.model.attention import varlen
from lora_serve.model.memory_setup import ActivationProbe
from lora_serve.model.native import operators
from lora_serve.model.runner.graphs import MAX_LONG_TOKENS, StepGraphs
from lora_serve.model.runner.model_runner import ModelRunner
from tests.contracts.test_attention import older_varlen
from tests.loading import load_adapter
from tests.local_engine import LocalEngine
from tests.model.recorded_call import RecordedCall, WatchedPrograms
from tests.oracle import save_adapter, save_tiny_model
from tests.tiers import by_tier

GREEDY = SampleInput(SamplingParams(temperature=0.0, logprobs=1), 0, 0, ())
MAX_ROWS = 6
# By day one layer with two adapted products: the interpreter takes its time for each.
FEW: dict[str, Any] = by_tier({"targets": ("q_proj", "down_proj"), "num_hidden_layers": 1}, {})


class World:
    """One model with an ordinary runner, and one that captures."""

    def __init__(
        self,
        root: Path,
        targets: Sequence[str] | None = None,
        architecture: str = "llama",
        parameters: Sequence[str] = (),
        settings: Mapping[str, Any] = MappingProxyType({}),
        **config: Any,
    ) -> None:
        model = save_tiny_model(architecture, root / "model", **config)
        given = {"target_modules": list(targets)} if targets else {}
        given |= {"target_parameters": list(parameters)} if parameters else {}
        adapters = {name: save_adapter(model, root / name, seed=i, **given) for i, name in enumerate("abc")}
        adapters["wide"] = save_adapter(model, root / "wide", r=20)
        adapters["narrow"] = save_adapter(model, root / "narrow", target_modules=["q_proj"])
        with pytest.MonkeyPatch.context() as patch:  # the recorder sees torch's operators, not calls into C
            patch.setattr(operators, "why_not", lambda weight: "not on a GPU")
            patch.setattr(ActivationProbe, "learn", lambda *_: ActivationModel())  # the interpreter takes 10 s for it
            self.engine = LocalEngine(
                model, adapters, block_size=4, max_loras=2, kv_cache_memory="200KiB", lora_kernel="triton",
                attention="sdpa", fuse_layers=False, **settings,
            )  # fmt: skip
        self.plain: Any = self.engine.parts.runner
        self.plain._model.group_experts()  # as on a GPU
        assert self.plain._model.join()
        self.recorders: list[RecordedCall] = []
        self.pools: list[list[RecordedCall]] = []  # the graphs of each
        kernel = self.plain._model.kernel
        kernel._programs = WatchedPrograms(kernel._programs, self.recorders)
        self.graphs = StepGraphs(
            self.plain._model,
            self.plain._cache,
            self.plain._slots,
            MAX_ROWS,
            self.new_pool,
        )
        self.captured = ModelRunner(
            self.plain._model, self.plain._cache, self.plain._slots, torch.device("cpu"), self.graphs
        )

    def new_pool(self) -> Callable[[], RecordedCall]:
        pool: list[RecordedCall] = []
        self.pools.append(pool)

        def new_graph() -> RecordedCall:
            pool.append(RecordedCall(self.recorders))
            return pool[-1]

        return new_graph

    def load(self, name: str, index: int, generation: int) -> RowAdapter:
        ref = self.engine.refs[name]
        slot = SlotRef(index, generation, ref.digest)
        saved = load_adapter(self.engine._folders[name], ref, self.engine.parts.spec)
        self.plain.load_slot(slot, self.engine.parts.fold(saved))
        return RowAdapter(slot)

    def prompt(self, i: int, length: int) -> tuple[int, ...]:
        """Puts a prompt into the cache, in blocks of its own. Returns its block table with room for one more."""
        table = tuple(range(1 + 3 * i, 4 + 3 * i))
        row = Row(i, tuple(range(3 + i, 3 + i + length)), 0, table, (), None, None)
        self.plain.run(Batch((row,), table))
        return table

    def agree(self, rows: list[Row]) -> None:
        """Both runners on the same rows, which write the same K and V again."""
        assert self.graphs.shape_of(rows) is not None
        before = self.num_replays
        found = self.captured.run(Batch(tuple(rows), ()))
        assert self.num_replays == before + 1
        for mine, plain in zip(found, self.plain.run(Batch(tuple(rows), ())), strict=True):
            assert same(mine, plain)

    @property
    def num_replays(self) -> int:
        return sum(recorder.num_replays for recorder in self.recorders)


def same(mine: RowOutput, plain: RowOutput) -> bool:
    if (mine.token_id, mine.error) != (plain.token_id, plain.error) or len(mine.following) != len(plain.following):
        return False
    pairs = [(mine, plain), *zip(mine.following, plain.following, strict=True)]
    return all(
        one.token_id == other.token_id and math.isclose(logprob_of(one), logprob_of(other), abs_tol=1e-5)
        for one, other in pairs
    )


def logprob_of(output: RowOutput | NextToken) -> float:
    assert (output.logprobs is None) == (output.token_id is None)
    return 0.0 if output.logprobs is None else output.logprobs.logprob


def decode(i: int, length: int, table: tuple[int, ...], token: int, *adapters: RowAdapter) -> Row:
    return Row(i, (token,), length, table[: length // 4 + 1], adapters, GREEDY, None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("graphs"), **FEW)


def test_replays_follow_rows_slots_scales_and_lengths(world: World) -> None:
    a, b = world.load("a", 0, 1), world.load("b", 1, 1)
    tables = [world.prompt(i, 4 + i) for i in range(3)]
    world.agree([decode(0, 4, tables[0], 9, a), decode(1, 5, tables[1], 8), decode(2, 6, tables[2], 7, b)])
    num_captured = len(world.recorders)
    world.agree([decode(2, 6, tables[2], 11, a), decode(1, 5, tables[1], 12, b), decode(0, 4, tables[0], 3, a)])
    half = RowAdapter(b.slot, 0.5)
    world.agree([decode(i, 4 + i, tables[i], 5 + i, half) for i in range(3)])
    world.agree([decode(i, 4 + i, tables[i], 5 + i, half) for i in range(3)] + [decode(3, 0, (20,), 6, a)])
    assert len(world.recorders) == num_captured  # four rows are one size with three


def test_replays_follow_chunks_and_positions(tmp_path: Path) -> None:
    """Llama 4's: chunks of 6 tokens, and queries scaled by position."""
    world = World(tmp_path, architecture="llama4_text")
    a, tables = world.load("a", 0, 1), [world.prompt(i, length) for i, length in enumerate((5, 6, 8))]
    world.agree([decode(0, 5, tables[0], 9, a), decode(1, 6, tables[1], 8), decode(2, 8, tables[2], 7)])
    num_captured = len(world.recorders)
    world.agree([decode(1, 6, tables[1], 8, a), decode(2, 8, tables[2], 7), decode(0, 5, tables[0], 9)])
    assert len(world.recorders) == num_captured


def test_a_slots_new_owner_is_found_without_a_new_capture(world: World) -> None:
    table, a = world.prompt(0, 4), world.load("a", 0, 2)
    world.agree([decode(0, 4, table, 9, a)])
    num_captured = len(world.recorders)
    world.agree([decode(0, 4, table, 9, world.load("c", 0, 3))])
    assert len(world.recorders) == num_captured


def test_steps_of_the_base_model_launch_no_deltas(world: World) -> None:
    tables = [world.prompt(i, 4) for i in range(2)]
    world.agree([decode(i, 4, table, 9 + i) for i, table in enumerate(tables)])
    assert not any(shape.with_lora for shape in list(world.graphs._captured)[-1:])


def test_idle_rows_write_nothing_that_is_somebodys(world: World) -> None:
    table = world.prompt(0, 4)
    pool = world.plain._cache._pools[0]
    before = pool[:, :, : world.plain._cache.num_blocks].clone()
    world.captured.run(Batch((decode(0, 4, table, 9), decode(1, 0, (20,), 4), decode(2, 0, (21,), 5)), ()))
    after = pool[:, :, : world.plain._cache.num_blocks].clone()
    for block, offset in ((table[1], 0), (20, 0), (21, 0)):
        assert not torch.equal(after[:, :, block, offset], before[:, :, block, offset])
        after[:, :, block, offset] = before[:, :, block, offset]
    assert torch.equal(after, before)
    assert not after[:, :, 0].any()


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose attention reads the cache as it lies: a graph can hold rows of several tokens."""
    world = World(tmp_path_factory.mktemp("paged"), ("q_proj", "lm_head"), num_hidden_layers=1)  # soon interpreted
    backend: Any = varlen.Backend(world.plain._cache, older_varlen, (torch.float32,))
    backend._paged._programs = WatchedPrograms(backend._paged._programs, world.recorders)
    world.plain._model._attention = backend
    return world


def test_replays_follow_when_attention_reads_the_cache_in_place(paged: World) -> None:
    a = paged.load("a", 0, 1)
    tables = [paged.prompt(i, 4 + i) for i in range(2)]
    paged.agree([decode(0, 4, tables[0], 9, a), decode(1, 5, tables[1], 8)])
    num_captured = len(paged.recorders)
    paged.agree([decode(1, 5, tables[1], 7, a), decode(0, 4, tables[0], 6)])
    assert len(paged.recorders) == num_captured


def chunk(i: int, start: int, count: int, first_block: int, *adapters: RowAdapter, **given: Any) -> Row:
    """`count` tokens of a prompt or, with `num_draft`, of an answer from `start` on."""
    blocks = tuple(range(first_block, first_block + -(-(start + count) // 4)))
    tokens = tuple((7 * i + 3 * position) % 50 for position in range(start, start + count))
    return Row(i, tokens, start, blocks, adapters, **{"sample": GREEDY, "prompt_targets": None, **given})


def test_prompts_and_drafts_beside_decoding_rows_are_replayed(paged: World) -> None:
    a, b = paged.load("a", 0, 2), paged.load("b", 1, 2)
    tables = [paged.prompt(i, 4 + i) for i in range(2)]
    decoding = [decode(0, 4, tables[0], 9, a), decode(1, 5, tables[1], 8)]
    unfinished = chunk(2, 0, 40, 20, b, sample=None)
    paged.agree([*decoding, unfinished])
    num_captured = len(paged.recorders)
    paged.agree([decode(1, 5, tables[1], 7, b), chunk(2, 40, 9, 20, b), chunk(3, 0, 3, 40, a), chunk(4, 0, 20, 42)])
    paged.agree([chunk(2, 49, 5, 20, b, num_draft=4), chunk(3, 3, 2, 40, replace(a, start=4))])
    assert len(paged.recorders) == num_captured, "all of them are one size"
    longer = by_tier((9, 20), (70, 30))  # those of the night are another size
    more = [chunk(5, 0, longer[0], 50, replace(a, scale=0.5)), chunk(6, 0, longer[1], 70, a)]
    paged.agree([decode(0, 4, tables[0], 9, b), *more])


def test_every_step_up_to_some_thousands_of_tokens_is_captured_at_start(paged: World) -> None:
    graphs = StepGraphs(paged.plain._model, paged.plain._cache, paged.plain._slots, 100, lambda: Counted)
    graphs.capture_all(1000)
    generator = random.Random(0)
    for _ in range(300):
        rows = [decode(i, generator.randrange(900), tuple(range(240)), 5) for i in range(generator.randrange(100))]
        rows += [chunk(i, 0, generator.randrange(2, 90), 1) for i in range(generator.randrange(9))]
        shape = graphs.shape_of(rows) if rows else None
        assert shape is None or shape in graphs._captured
    found = graphs.stats()
    assert (found.num_captured, found.num_failed) == (2 * 2 * (8 + 3 * 4), 0)


def test_start_tries_no_more_than_one_size_of_a_model_that_cannot_be_captured(
    paged: World, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = StepGraphs(paged.plain._model, paged.plain._cache, paged.plain._slots, 100, lambda: Refused)
    graphs.capture_all(1000)
    assert caplog.text.count("not captured") == 1
    assert graphs.launch([decode(0, 4, (1, 2), 5)]) is None


class Counted:
    """A graph that takes no time."""

    def capture(self, call: Any) -> torch.Tensor:
        return torch.empty(0)

    def replay(self) -> None:
        raise AssertionError("nothing was captured")


def test_rows_of_several_tokens_that_are_too_many_go_the_ordinary_way(paged: World) -> None:
    fits = [chunk(i, 0, 8, 1) for i in range(MAX_LONG_TOKENS // 8)]
    assert paged.graphs.shape_of(fits) is not None
    assert paged.graphs.shape_of([*fits, chunk(99, 0, 2, 1)]) is None
    assert paged.graphs.shape_of([chunk(0, 0, MAX_LONG_TOKENS + 1, 1)]) is None
    drafts = [chunk(i, 0, 8, 1, num_draft=7) for i in range(MAX_LONG_TOKENS // 64)]
    assert paged.graphs.shape_of(drafts) is not None
    assert paged.graphs.shape_of([*drafts, chunk(99, 0, 2, 1)]) is None


def test_replays_follow_which_rows_are_long(tmp_path: Path) -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 6.0, 8.0]}
    world = World(tmp_path, rope_parameters={**factors, "original_max_position_embeddings": 32})
    tables, a = [world.prompt(i, 4 + i) for i in range(2)], world.load("a", 0, 1)
    rows = [decode(0, 4, tables[0], 9, a), decode(1, 5, tables[1], 8)]
    found = []
    for i in (0, 1):
        rows[i] = replace(rows[i], is_long=True)
        world.agree(rows)
        found.append(world.captured.run(Batch((rows[1],), ()))[0])
    assert not same(*found)
    assert len(world.recorders) == 2  # of two rows, and of one


def test_growth_of_slots_or_ranks_and_a_resized_pool_are_captured_anew(tmp_path: Path) -> None:
    """And into memory of their own: torch refuses a capture into a pool whose graphs are all gone."""
    world = World(tmp_path, **FEW)
    table = world.prompt(0, 4)
    world.agree([decode(0, 4, table, 9, world.load("a", 0, 1))])
    world.agree([decode(0, 4, table, 9, world.load("b", 40, 1))])
    world.agree([decode(0, 4, table, 9, world.load("wide", 1, 1))])
    world.plain._cache.resize(40)
    table = world.prompt(0, 4)
    world.agree([decode(0, 4, table, 9, world.load("a", 0, 2))])
    assert len(world.graphs._captured) == 1
    assert [len(pool) for pool in world.pools] == [1, 1, 1, 1]


def test_what_a_graph_cannot_hold_goes_the_ordinary_way(world: World) -> None:
    a, b = world.load("a", 0, 9), world.load("b", 1, 9)
    table = (1, 2, 3)
    base = decode(0, 4, table, 9)
    assert world.graphs.shape_of([base]) is not None
    refused = {
        "a prompt's tokens, where attention reads no tiles": chunk(0, 4, 2, 1),
        "prompt log-probabilities": Row(0, (9,), 4, table, (), GREEDY, (3,)),
        "composed adapters": decode(0, 4, table, 9, a, b),
    }
    for words, row in refused.items():
        assert world.graphs.shape_of([base, row]) is None, words
    assert world.graphs.shape_of([base] * (MAX_ROWS + 1)) is None
    world.agree([base, decode(1, 4, table, 9, RowAdapter(a.slot, 1.0, 5))])  # it begins with a later token
    world.plain._slots._contents[1].has_changes = True
    assert world.graphs.shape_of([decode(0, 4, table, 9, b)]) is None
    assert world.graphs.shape_of([decode(0, 4, table, 9, a)]) is not None
    world.plain._slots._contents[1].has_changes = False


class Refused:
    """A graph of a model whose code waits for the device."""

    def capture(self, call: Any) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        raise AssertionError("nothing was captured")


def test_a_model_that_cannot_be_captured_is_served_the_ordinary_way(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    plain = world.plain
    graphs = StepGraphs(plain._model, plain._cache, plain._slots, 4, lambda: Refused)
    runner = ModelRunner(plain._model, plain._cache, plain._slots, torch.device("cpu"), graphs)
    row = decode(0, 0, (1,), 9)
    for _ in range(2):
        assert same(runner.run(Batch((row,), (1,)))[0], plain.run(Batch((row,), (1,)))[0])
    assert caplog.text.count("not captured") == 1
    graphs._new_graph = world.new_pool()
    rows = [decode(i, 0, (1 + i,), 9) for i in range(3)]
    runner.run(Batch(tuple(rows), (1, 2, 3)))
    assert [shape.num_rows for shape in graphs._captured] == [4], "other sizes are captured all the same"


def test_waiting_for_the_device_within_a_capture_is_seen() -> None:
    with pytest.raises(RuntimeError, match="makes the host wait"):
        RecordedCall().capture(lambda: torch.ones(1) * torch.ones(1).item())
