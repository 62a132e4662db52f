"""The canaries themselves: they are answered right by a sound server, and notice each thing that can go wrong."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.attempts import in_some_attempt
from tests.canary.asking import Canaries, Verdict, judge
from tests.canary.figures import Figures, base_digest
from tests.canary.house import House
from tests.canary.loop_lag import INTERVAL, LIMIT, own_part
from tests.canary.questions import NEW_TOKENS, Question, World
from tests.canary.watch import unplanned, watching


def answer_of(question: Question, model: str, noise: float = 0.0) -> dict[str, object]:
    """What a server would send that answers this question with `model`'s log-probabilities."""
    logprobs = {"tokens": [f"token_id:{token}" for token in question.tokens]}
    return {"choices": [{"logprobs": {**logprobs, "token_logprobs": (question.logprobs[model] + noise).tolist()}}]}


def test_sound_server_answers_all_of_them_right(house: House, canaries: Canaries) -> None:
    def ask() -> None:
        with watching(house, canaries, max_lag=LIMIT) as watch:
            pass
        assert watch.verdict.num_right >= 2 * 12

    in_some_attempt(ask)


def test_every_question_tells_its_model_from_all_others(world: World) -> None:
    for question in world.questions:
        assert judge(question, answer_of(question, question.model)) == ""
        for model in question.logprobs:
            if model != question.model:
                assert judge(question, answer_of(question, model)) != ""


def test_answer_that_is_a_little_off_is_noticed(world: World) -> None:
    question = world.questions[1]
    assert "off by" in judge(question, answer_of(question, question.model, noise=0.01))
    assert "tokens" in judge(replace(question, tokens=(1,) * NEW_TOKENS), answer_of(question, question.model))


async def test_swapped_adapters_are_noticed(house: House, world: World) -> None:
    first, second = world.questions[1], world.questions[2]
    verdict = Verdict()
    await Canaries([replace(first, model=second.model)], house.keys).round(house.url, verdict)
    assert len(verdict.faults) == 1


def test_changed_base_weight_is_noticed(house: House) -> None:
    before = base_digest(house)
    norm = next(p for name, p in house.parts.runner._model.module.named_parameters() if "norm" in name)  # type: ignore[union-attr]
    with torch.no_grad():
        norm[0] += 1e-3
        assert base_digest(house) != before
        norm[0] -= 1e-3


def test_open_socket_and_left_file_are_noticed(house: House) -> None:
    before = Figures.of(house)
    with socket.create_connection(("127.0.0.1", house.port)):
        assert {"descriptors", "tasks"} <= set(before.differences(Figures.of(house)))
    left = house.store / "tmp" / "left"
    left.touch()
    assert "temporary_files" in before.differences(Figures.of(house))
    left.unlink()


def test_loop_that_is_kept_is_noticed(house: House) -> None:
    """By processor time of a turn, and by lag; whoever keeps Python's lock on another thread shows as lag alone, and a
    client of the tests in this process as neither.
    """

    async def keep() -> None:
        start = time.thread_time()
        while time.thread_time() - start < 0.3:
            pass

    before = house.lag.mark()
    house.on_loop(asyncio.sleep(0.1))
    assert house.lag.since(before).longest_turn[0] < LIMIT
    house.on_loop(keep())
    house.on_loop(asyncio.sleep(0.1))
    during = house.lag.since(before)
    assert during.longest_turn[0] >= 0.3
    assert "keep" in during.longest_turn[1]
    assert during.p99 > LIMIT

    before = house.lag.mark()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(sum, range(20_000_000)).result()  # one call into C: nobody gets Python's lock meanwhile
        house.on_loop(asyncio.sleep(0.1))  # while the thread lives: what an ended one computed is told nowhere
    during = house.lag.since(before)
    assert during.longest_turn[0] < LIMIT < max(during.lags)

    before = house.lag.mark()
    assert sum(range(20_000_000))
    house.on_loop(asyncio.sleep(0.1))
    during = house.lag.since(before)
    assert max(during.lags) < LIMIT < max(during.wall)


def test_lag_of_a_busy_machine_is_not_the_servers() -> None:
    before = {"loop": (0.0, 0.0), "reader": (5.0, 1.0)}
    assert own_part(0.5, before, {"loop": (0.0, 0.0), "reader": (5.5, 1.0)}) == 0.5  # the reader kept it
    assert own_part(0.5, before, {"loop": (0.0, 0.0), "reader": (5.3, 1.2)}) == pytest.approx(0.3)
    assert own_part(0.5, before, {"loop": (0.0, 0.48), "reader": (5.0, 1.0)}) == pytest.approx(0.0)
    assert own_part(0.5, before, {"loop": (0.01, 0.2), "reader": (5.02, 1.2)}) == pytest.approx(0.02)
    assert own_part(0.5, before, {"loop": (0.0, 0.0), "reader": (5.4, 1.0)}, stolen=0.1) == pytest.approx(0.4)
    assert own_part(0.5, before, {"loop": (0.0, 0.0), "reader": (5.2, 1.0)}, stolen=0.1) == pytest.approx(0.2)
    assert own_part(0.5, before, {"loop": (0.0, 0.0), "reader": (5.5, 1.0)}, stolen=0.03) == pytest.approx(0.47)


def test_lag_of_a_client_in_this_process_is_not_the_servers() -> None:
    before = {"loop": (0.0, 0.0), "client": (5.0, 1.0)}
    assert own_part(0.5, before, {"loop": (0.0, 0.0), "client": (5.5, 1.0)}, {"client"}) == pytest.approx(INTERVAL)
    assert own_part(0.5, before, {"loop": (0.5, 0.0), "client": (5.01, 1.0)}, {"client"}) == pytest.approx(0.5)
    assert own_part(0.5, before, {"loop": (0.02, 0.1), "client": (5.3, 1.1)}, {"client"}) == pytest.approx(0.02)


@pytest.mark.parametrize("line", ["ERROR lora_serve x failed", "WARNING x\nTraceback (most recent call last)"])
def test_unplanned_error_in_the_log_is_noticed(line: str) -> None:
    assert unplanned([line], []) == [line]
    assert unplanned([line], ["x"]) == []
