"""64 adapters on 1, 2 and 4 slots while ids are registered and deleted: no answer is another's.

Short races; `scripts/reliability` runs 20 000 answers and writes down what came out.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.canary.asking import Canaries
from tests.canary.figures import Figures, settled
from tests.canary.house import ADMIN, House, running, settings_of
from tests.canary.questions import World
from tests.canary.races import Field, make_field, quiet_field, race, same_tokens
from tests.oracle import save_adapter, save_tiny_model
from tests.text.tiny_tokenizer import byte_level_tokenizer
from tests.tiers import by_tier, mostly_nightly

NUM_ANSWERS = by_tier(80, 200)  # with each number of slots
FUSED = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}  # layers of which none is torch's
ROUNDED_ELSEWHERE = 0.2  # of greedy answers: bfloat16's first token that is not float32's changes all that follow


@pytest.fixture(scope="module")
def runners(world: World, tmp_path_factory: pytest.TempPathFactory) -> Field:
    return make_field(world.model, world.adapters["acme/a"], tmp_path_factory.mktemp("race", numbered=True), 64)


def num_evictions(house: House) -> int:
    return house.on_loop(house.services.client.stats()).tiers["device"].evictions


@pytest.mark.search
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
        assert num_evictions(house) > NUM_ANSWERS / 4
        assert settled(house, before) == {}


@pytest.mark.nightly  # by day: tests/model/fusion/test_row_alone.py
def test_answers_in_bfloat16_are_the_same_bits_in_a_race(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    model = save_tiny_model("llama", tmp_path / "model", vocab_size=len(tokenizer), **FUSED)
    tokenizer.save_pretrained(model)
    template = save_adapter(model, tmp_path / "template", seed=0, std=0.2, r=2)
    runners = make_field(model, template, tmp_path / "racers", 64)
    world = World(tmp_path, model, {}, [])
    settings = settings_of(
        world, tmp_path / "store", dtype="bfloat16", max_loras=2, max_cpu_loras=6, lora_modules=(), auth="off"
    )
    with running(settings) as house:
        quiet = asyncio.run(quiet_field(house.url, ADMIN, runners))
        assert same_tokens(quiet, runners) > 1 - ROUNDED_ELSEWHERE
        before, evictions = Figures.of(house), num_evictions(house)
        outcome = asyncio.run(race(house.url, ADMIN, quiet, NUM_ANSWERS, seed=5))
        assert outcome.wrong == []
        assert outcome.num_deletions > 0
        assert num_evictions(house) > evictions + NUM_ANSWERS / 4
        assert settled(house, before) == {}
