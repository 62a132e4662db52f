"""Tokens that a graph draws are the very tokens that the sampler draws, whatever stands beside them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, Row, RowAdapter, RowOutput, SampleInput, SlotRef
from lora_serve.core.errors import NumericalError
from lora_serve.core.request import SamplingParams
from lora_serve.model.runner import model_runner
from lora_serve.model.runner.draw_graphs import ALL_KINDS, NUM_COLUMNS, DrawGraphs, plan_draws
from lora_serve.model.runner.packing import LogitSpan
from lora_serve.model.runner.sampler import choose
from tests.model.recorded_call import RecordedCall
from tests.model.runner.table_model import TableWorld

PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1e-9, "top_k": 3},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.4, "min_p": 0.02},
    {"temperature": 1.1, "top_k": 250, "top_p": 0.7, "min_p": 0.001, "min_tokens": 3},
    {"temperature": 30.0, "top_p": 0.99},  # keeps more tokens than a graph looks at
]
OTHER: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "frequency_penalty": 0.7},
    {"temperature": 0.7, "logit_bias": ((5, 3.0),)},
    {"temperature": 0.7, "bad_words": ((5,),)},
    {"temperature": 0.0, "allowed_token_ids": (3, 4)},
    {"temperature": 0.0, "min_tokens": 50, "stop_token_ids": tuple(range(0, 300, 2))},
]


def sample_of(params: dict[str, Any], generator: random.Random) -> SampleInput:
    return SampleInput(SamplingParams(**params), generator.getrandbits(63), generator.randrange(3, 40), (7,))


@pytest.mark.parametrize("vocab_size", [40, 256, 300, 2000])
def test_captured_draws_are_the_samplers(vocab_size: int) -> None:
    generator, device = random.Random(vocab_size), torch.device("cpu")
    torch.manual_seed(vocab_size)
    graphs, recorders, num_drawn, num_left = DrawGraphs(12, vocab_size, device), list[RecordedCall](), 0, 0
    for _ in range(40):
        samples = [sample_of(generator.choice(PLAIN), generator) for _ in range(generator.randrange(1, 9))]
        rows: list[Any] = [Row(i, (3,), 0, (), (), sample, None) for i, sample in enumerate(samples)]
        logits = (generator.choice([0.5, 3.0, 40.0]) * torch.randn(12, vocab_size)).round(decimals=1)  # many are equal
        logits[generator.randrange(12)] = float("nan")
        logits[generator.randrange(12), 5] = float("-inf")
        graphs.logits(12).copy_(logits)
        columns = torch.zeros(NUM_COLUMNS, 12, dtype=torch.float64)
        planned = plan_draws(rows, [LogitSpan(i, i + 1) for i in range(len(rows))], columns.numpy())
        graphs.columns(12).copy_(columns)
        drawn = graphs.launch(12, planned, lambda: RecordedCall(recorders))
        assert drawn is not None
        graphs.logits(12).zero_()
        found = drawn.wait()
        for i, wanted in enumerate(choose(logits[: len(rows)], samples)):
            if i in found:
                assert found[i] == [wanted] or not found[i][0].is_number, samples[i]
                assert found[i][0].is_number == wanted.is_number
            else:
                assert samples[i].params.top_p == 0.99 or samples[i].params.min_p, samples[i]
        num_drawn, num_left = num_drawn + len(found), num_left + len(rows) - len(found)
    assert num_drawn > 100
    assert (num_left > 0) == (vocab_size > 256), "a flat distribution has to be drawn again"
    assert len(recorders) <= len(ALL_KINDS)


def test_replayed_steps_give_the_tokens_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed with rows that no graph can draw, prompts and guesses, over steps of many sizes."""
    world, generator = TableWorld(), random.Random(1)
    world.slots.load(slot := SlotRef(1, 1, "a"), None)
    num_eager = num_right = 0
    real = model_runner.draw_rows

    def counted(logits: Any, rows: Any, *, all_at_once: bool) -> dict[int, RowOutput]:
        nonlocal num_eager
        num_eager += len(rows)
        return real(logits, rows, all_at_once=all_at_once)

    for step in range(60):
        kinds = [PLAIN[:-1], PLAIN, PLAIN + OTHER][step % 3]
        rows = []
        for i in range(generator.randrange(1, 8)):
            start, count = generator.randrange(12), generator.choice([1, 1, 1, 4])
            draft = generator.randrange(count)
            tokens = tuple(generator.randrange(3, 290) for _ in range(count))
            adapters = (RowAdapter(slot),) if generator.random() < 0.4 else ()
            blocks = tuple(range(1 + 5 * i, 5 + 5 * i))
            sample = None if generator.random() < 0.1 else sample_of(generator.choice(kinds), generator)
            num_draft = draft if sample else 0
            rows.append(Row(i, tokens, start, blocks, adapters, sample, None, num_draft=num_draft))
        wanted = world.plain.run(Batch(tuple(rows), ()))
        rows = [_with_right_guess(row, output) for row, output in zip(rows, wanted, strict=True)]
        wanted = world.plain.run(Batch(tuple(rows), ()))
        monkeypatch.setattr(model_runner, "draw_rows", counted)
        before, num_eager = world.graphs.stats().num_replayed, 0
        assert world.captured.run(Batch(tuple(rows), ())) == wanted
        assert world.graphs.stats().num_replayed == before + 1
        monkeypatch.setattr(model_runner, "draw_rows", real)
        assert step % 3 or not num_eager, "no row of such a step is left to the host"
        num_right += sum(bool(output.following) for output in wanted)
    assert num_right > 10


def _with_right_guess(row: Row, output: RowOutput) -> Row:
    """A row whose first guess is what comes there."""
    if not row.num_draft or output.token_id is None:
        return row
    end = len(row.token_ids) - row.num_draft
    return replace(row, token_ids=(*row.token_ids[:end], output.token_id, *row.token_ids[end + 1 :]))


def test_a_row_without_numbers_ends_alone_where_a_graph_draws() -> None:
    world = TableWorld()
    rows = [Row(i, (9 + i,), 0, (1 + i,), (), sample_of(PLAIN[2], random.Random(i)), None) for i in range(3)]
    first = world.captured.run(Batch(tuple(rows), ()))
    world.slots.load(SlotRef(1, 1, "a"), None)
    world.model.table.fill_(float("nan"))
    assert all(isinstance(out.error, NumericalError) for out in world.captured.run(Batch(tuple(rows), ())))
    assert all(out.error is None for out in first)


def test_tokens_that_cannot_be_captured_are_drawn_by_the_host(caplog: pytest.LogCaptureFixture) -> None:
    class Refused(RecordedCall):
        def capture(self, call: Any) -> torch.Tensor:
            if self.is_of_draws:
                raise RuntimeError("out of memory")
            return super().capture(call)

        is_of_draws = False

    world = TableWorld()

    def new_graph() -> RecordedCall:
        graph = Refused(world.recorders)
        graph.is_of_draws = bool(world.graphs._captured)
        return graph

    world.graphs._new_graph = new_graph
    row = Row(0, (9,), 0, (1,), (), sample_of(PLAIN[2], random.Random(1)), None)
    for _ in range(2):
        assert world.captured.run(Batch((row,), ())) == world.plain.run(Batch((row,), ()))
    assert world.graphs.stats().num_replayed == 2
    assert caplog.text.count("not drawn by a graph") == 1
