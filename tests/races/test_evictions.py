"""64 adapters on 1, 2 and 4 slots while ids are registered and deleted: no answer is another's.

A short race; `scripts/reliability` runs 20 000 answers and writes down what came out.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.canary.asking import Canaries
from tests.canary.figures import Figures, settled
from tests.canary.house import ADMIN, running, settings_of
from tests.canary.questions import World
from tests.canary.races import Field, make_field, race
from tests.tiers import mostly_nightly

NUM_ANSWERS = 200  # with each number of slots


@pytest.fixture(scope="module")
def runners(world: World, tmp_path_factory: pytest.TempPathFactory) -> Field:
    return make_field(world.model, world.adapters["acme/a"], tmp_path_factory.mktemp("race", numbered=True), 64)


@pytest.mark.parametrize("slots", mostly_nightly([1, 2, 4], 2))
def test_no_answer_is_anothers_whoever_is_pushed_out(
    world: World, canaries: Canaries, runners: Field, slots: int, tmp_path: Path
) -> None:
    roots = (world.root, *{folder.parent for folder in runners.folders.values()})
    settings = settings_of(
        world, tmp_path / "store", max_loras=slots, max_cpu_loras=6, adapter_root=roots, lora_modules=()
    )
    with running(settings) as house:
        before = Figures.of(house)
        outcome = asyncio.run(race(house.url, ADMIN, runners, NUM_ANSWERS, seed=slots))
        assert outcome.wrong == []
        assert outcome.num_answers >= NUM_ANSWERS
        assert outcome.num_deletions > 0
        evictions = house.on_loop(house.services.client.stats()).tiers["device"].evictions
        assert evictions > NUM_ANSWERS / 4
        assert settled(house, before) == {}
