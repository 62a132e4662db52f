"""Replayed steps that are launched ahead feed one another on the device, and give the tokens of eager steps."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, Row, RowOutput, SampleInput
from lora_serve.core.messages import FinishEvent
from lora_serve.core.request import SamplingParams
from lora_serve.model.runner import draw_graphs, model_runner
from tests.engine.world import World, adapter
from tests.model.runner.table_model import TableWorld

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.02},
]
WIDE = {"temperature": 30.0, "top_p": 0.99}  # keeps more tokens than a graph looks at


def requests(generator: random.Random) -> list[tuple[int, str, list[int], Any, dict[str, Any]]]:
    """When each comes, by steps, its name, its prompt, its adapter and how it is sampled."""
    found = []
    for number in range(14):
        params = dict(generator.choice(KINDS)) if generator.random() < 0.93 else dict(WIDE)
        params |= {"max_tokens": generator.randrange(1, 25), "seed": generator.getrandbits(63)}
        if generator.random() < 0.3:
            params["stop_token_ids"] = tuple(range(generator.randrange(20), 300, 20))
        prompt = [generator.randrange(3, 290) for _ in range(generator.randrange(1, 20))]
        ref = adapter(generator.choice("abc")) if generator.random() < 0.6 else None
        found.append((generator.randrange(40), f"r{number}", prompt, ref, params))
    return sorted(found, key=lambda item: item[0])


def answers(coming: list[Any], *, ahead: bool, num_blocks: int, aborted: dict[int, str]) -> tuple[World, TableWorld]:
    device = TableWorld(num_blocks)
    world = World(num_blocks, max_num_seqs=6, max_num_batched_tokens=16, max_loras=2)
    execution: Any = world.engine.execution
    execution.runner = device.captured if ahead else device.plain
    execution.flights._launcher = device.captured if ahead else None
    with torch.inference_mode():
        for step in range(45):
            for _, name, prompt, ref, params in (item for item in coming if item[0] == step):
                world.add(name, prompt, ref, **params)
            if step in aborted:
                world.scheduler.abort(aborted[step])
            world.step()
        world.run()
    world.check_nothing_held()
    return world, device


@pytest.mark.parametrize("seed", range(4))
def test_launched_steps_give_the_tokens_of_steps_that_are_waited_for(seed: int, caplog: Any) -> None:
    generator = random.Random(seed)
    coming, num_blocks = requests(generator), 20 if seed % 2 else 64
    aborted = {generator.randrange(45): f"r{generator.randrange(14)}" for _ in range(2)}
    plain, _ = answers(coming, ahead=False, num_blocks=num_blocks, aborted={})
    ahead, device = answers(coming, ahead=True, num_blocks=num_blocks, aborted=aborted)
    for _, name, *_ in coming:
        if name in ahead.ends:
            assert isinstance(ahead.ends[name], FinishEvent)
            assert ahead.tokens[name] == plain.tokens[name], name
        else:
            assert name in aborted.values()
    assert device.graphs.stats().num_replayed > 20
    assert not caplog.text


def test_a_token_is_fed_on_the_device_and_a_wide_draw_is_left_to_the_host() -> None:
    device = TableWorld()
    rows = [plain_row(i, (9 + i,), 0, **(WIDE if i == 2 else KINDS[i])) for i in range(3)]
    first = device.captured.launch(Batch(tuple(rows), (1, 2, 3)), None)
    assert first is not None
    fed = [plain_row(i, (0,), 1, is_fed=True, **KINDS[i]) for i in (1, 0)]
    second = device.captured.launch(Batch((*fed, plain_row(3, (8, 7, 6), 0, **KINDS[1])), (4,)), first)
    assert second is not None
    mine = first.collect()
    wanted = device.plain.run(Batch(tuple(rows), ()))
    assert mine == [*wanted[:2], None]
    known = [plain_row(i, (mine[i].token_id,), 1, **KINDS[i]) for i in (1, 0)]  # type: ignore[union-attr]
    assert second.collect() == device.plain.run(Batch((*known, plain_row(3, (8, 7, 6), 0, **KINDS[1])), ()))


def test_a_step_whose_tokens_no_graph_draws_is_not_replayed_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TableWorld()
    batch = Batch((plain_row(0, (9,), 0, **KINDS[0]),), (1,))
    with monkeypatch.context() as patch:
        patch.setattr(draw_graphs, "draw_captured", _fails)
        assert device.captured.launch(batch, None) is None
    num_before = device.graphs.stats().num_replayed
    assert device.captured.launch(batch, None) is None
    assert device.graphs.stats().num_replayed == num_before


def _fails(*_: Any) -> Any:
    raise RuntimeError("it cannot be recorded")


def test_a_step_of_rows_that_draw_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, waited = TableWorld(), list[int]()
    monkeypatch.setattr(model_runner, "copy_to_host", lambda tensor: lambda: waited.append(1) or [tensor])
    flight = device.captured.launch(Batch((replace(plain_row(0, (9, 8), 0), sample=None),), (1,)), None)
    assert flight is not None
    assert (flight.collect(), waited) == ([RowOutput(0, None)], [1])


def plain_row(i: int, tokens: Any, start: int, *, is_fed: bool = False, **params: Any) -> Row:
    return Row(i, tokens, start, (1 + i,), (), SampleInput(SamplingParams(**params), i, start, ()), None, is_fed=is_fed)
