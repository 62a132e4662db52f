"""Tokens that a step gave, and those that a grammar left no choice about: each counts once."""

from __future__ import annotations

from tests.engine.fake_constraints import FakeConstraints, grammar
from tests.engine.world import World

FREE = range(100, 300)


def test_every_token_is_charged_once_and_those_without_a_choice_are_told_apart() -> None:
    world = World(constraints=FakeConstraints())
    charged: list[int] = []
    world.scheduler._policy.served = lambda sequence, num_prompt, num_output: charged.append(num_output)  # type: ignore[method-assign]
    world.add("text", [1, 2], max_tokens=6)
    world.run()
    assert world.engine.stats().num_forced == 0
    world.add("form", [1, 2], grammar=grammar(FREE, [7], [8], FREE, FREE), max_tokens=9)
    world.run()
    assert world.engine.stats().num_forced == 2
    assert sum(charged) == len(world.tokens["text"]) + len(world.tokens["form"]) == 11
