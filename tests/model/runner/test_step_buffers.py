"""What a step's buffers keep from the step before is nothing but what is the same."""

from __future__ import annotations

import random

import torch

from lora_serve.core.batch import Row
from lora_serve.model.runner.step_buffers import GraphShape, StepBuffers

SHAPE, BLOCK_SIZE, IDLE = GraphShape(6, 64, 8, with_lora=True), 4, 99


def new_buffers() -> StepBuffers:
    return StepBuffers(SHAPE, BLOCK_SIZE, [IDLE], torch.device("cpu"))


def test_tables_are_those_of_buffers_that_are_filled_for_the_first_time() -> None:
    """Rows grow, end, come in the place of others, begin anew with other blocks, and read prompts beside."""
    generator, kept = random.Random(2), new_buffers()
    tables = {i: [1 + i] for i in range(9)}
    for _ in range(60):
        for i, blocks in tables.items():
            if generator.random() < 0.1:
                tables[i] = [generator.randrange(1, 90) for _ in range(generator.randrange(1, 8))]
            elif len(blocks) < 8 and generator.random() < 0.3:
                blocks.append(generator.randrange(1, 90))
        chosen = sorted(generator.sample(sorted(tables), generator.randrange(1, 7)))
        num_long = generator.randrange(min(len(chosen), 3))
        rows = []
        for place, i in enumerate(chosen):
            count = 2 if place >= len(chosen) - num_long else 1
            start = BLOCK_SIZE * len(tables[i]) - count
            rows.append(Row(i, (7,) * count, start, tuple(tables[i]), (), None, None))
        fresh = new_buffers()
        assert kept.fill(rows) == fresh.fill(rows)
        assert torch.equal(kept._memory, fresh._memory)
