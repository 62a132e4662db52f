"""Costs and fairness by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_serve.core.batch import StepLoad
from lora_serve.core.errors import ConfigError
from lora_serve.simulate.figures import FairnessMeter, fairness_of, jain_index
from lora_serve.simulate.profiles import LearnedSteps, RooflineSteps, profile_names, read_profile
from tests.simulate.small_fleet import rows, scenario


def test_a_step_is_as_long_as_its_bytes_or_its_arithmetic_whichever_takes_longer() -> None:
    steps = RooflineSteps(1000, 2000, 10, 200, 1000, 1e5, 0.5, 0.5, 0.25)
    decode, prefill = StepLoad(2, 2, 2, 30), StepLoad(1000, 1, 1, 1000)
    assert steps.seconds(decode) == pytest.approx(0.25 + (2000 + 300 + 400) / 500)
    assert steps.seconds(prefill) == pytest.approx(0.25 + max((2000 + 10000 + 200) / 500, 2 * 1000 * 1100 / 5e4))


def test_learned_steps_give_back_what_was_recorded() -> None:
    loads = [
        StepLoad(tokens, rows, adapters, kv)
        for tokens in (1, 4, 16, 64, 256)
        for rows in (1, 4, 8)
        for adapters in (1, 3)
        for kv in (10, 500, 3000)
    ]

    def truth(load: StepLoad) -> float:
        return 0.02 + 1e-3 * load.num_tokens + 2e-3 * load.num_rows + 1e-3 * load.num_adapters + 2e-6 * load.num_kv_read

    steps = LearnedSteps([(load, truth(load)) for load in loads])
    errors = sorted(abs(steps.seconds(load) / truth(load) - 1) for load in loads)
    assert errors[len(errors) // 2] < 0.1


def test_every_profile_that_comes_along_can_be_read_and_takes_longer_for_more() -> None:
    assert "llama-8b-h100" in profile_names()
    for name in profile_names():
        steps = read_profile(name).steps
        assert 0 < steps.seconds(StepLoad(1, 1, 1, 100)) < steps.seconds(StepLoad(1000, 16, 16, 20000))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": {"recorded": []}, "source": ""}'])
def test_a_wrong_profile_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"--profile .*mine.json: is not a profile"):
        read_profile(str(file))


def test_an_unknown_profile_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="llama-8b-h100"):
        read_profile("none")


def test_jains_index_is_one_for_equals_and_one_nth_for_one_of_n() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain_index([0.0, 0.0]) == 1.0


def test_the_service_gap_is_between_accounts_that_waited_during_the_whole_window() -> None:
    meter = FairnessMeter({"heavy": 2.0}, window=1.0)
    for now, waiting in ((0.0, ["a", "heavy", "short"]), (0.5, ["a", "heavy"]), (1.0, [])):
        meter.look(waiting, now)
        meter.served("a", 10)
        meter.served("heavy", 40)
        meter.served("short", 1000)
    fairness = fairness_of([meter])
    assert fairness.num_windows == 1
    assert fairness.max_service_gap == pytest.approx(80 / 2 - 20)
    assert fairness.jain == pytest.approx(60**2 / (2 * (20**2 + 40**2)))


def test_without_two_that_wait_there_is_nothing_to_compare() -> None:
    config = scenario(20, rate=0.5)
    assert config.run(config.arrivals(rows((8, 2))), "fcfs", "hash").fairness.num_windows == 0


def test_a_flooding_tenant_is_seen_in_the_gap() -> None:
    config = scenario(400, rate=200.0, flood=0.8, num_tenants=2)
    fairness = config.run(config.arrivals(rows((30, 10))), "fcfs", "hash").fairness
    assert fairness.num_windows > 0
    assert fairness.jain < 0.9


def test_a_profile_is_plain_json(tmp_path: Path) -> None:
    text = (Path(read_profile.__code__.co_filename).parent / "profiles" / "llama-8b-h100.json").read_text()
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**json.loads(text), "source": "mine"}))
    assert (read_profile(str(file)).name, read_profile(str(file)).source) == ("mine", "mine")
