"""A row brings what its way of sampling reads, and nothing that it does not."""

from __future__ import annotations

from tests.engine.world import World


def test_history_is_brought_where_it_is_read() -> None:
    world = World()
    world.add("plain", [1, 2, 3], max_tokens=3)
    world.add("penalties", [4, 5, 6], max_tokens=3, repetition_penalty=1.5)
    world.add("bad words", [7, 8, 9], max_tokens=3, bad_words=((1,),))
    world.run()
    world.check_answers()
    samples = [row.sample for row in world.runner.batches[-1].rows]
    assert [sample and sample.prompt_token_ids for sample in samples] == [(), (4, 5, 6), ()]
    outputs = [(), *(tuple(world.tokens[name][:2]) for name in ("penalties", "bad words"))]
    assert [sample and sample.output_token_ids for sample in samples] == outputs
