"""Trials of drafts: how they begin, when they end, and who is concerned. Steps take what the test says."""

from __future__ import annotations

import random
from statistics import fmean

from lora_serve.engine.acceptance import DraftedStep, DraftTrial, DraftTrials

PLAIN = 1e-3  # seconds that every step was expected to take, with drafts or without


def drafted(seconds: float = PLAIN) -> DraftedStep:
    """A step whose guess did not come true, though half as many tokens again were promised."""
    return DraftedStep(1, 1, 0.5, PLAIN, PLAIN, seconds)


def length_of_trial(trial: DraftTrial, factor: float, scatter: float = 0.0, seed: int = 0) -> int:
    """The steps with drafts until there are no more, where these take `factor` times as long as they should; 40 at
    most.
    """
    clock = random.Random(seed)
    for num_drafted in range(40):
        while not trial.begin_step():
            trial.observe_plain(PLAIN, PLAIN * clock.lognormvariate(0, scatter))
        if not trial.may_run(0.5):
            return num_drafted
        trial.observe_drafted(drafted(PLAIN * factor * clock.lognormvariate(0, scatter)))
    return 40


def test_drafts_are_on_trial_from_the_start() -> None:
    trial = DraftTrial()
    assert trial.begin_step()
    trial.observe_drafted(drafted())
    assert not trial.begin_step()
    assert trial.is_control, "the second step goes without, to be compared"
    trial.observe_plain(PLAIN, PLAIN)
    assert trial.begin_step()


def test_drafts_that_lost_are_looked_at_again_only_if_they_promise_more() -> None:
    trial = DraftTrial()
    assert length_of_trial(trial, 3.0) < 8
    assert trial.begin_step(), "guesses are looked for, as they may promise more"
    assert not trial.may_run(0.5)
    assert trial.may_run(2.0)
    assert trial.begin_step()
    assert trial.may_run(0.5), "they are on trial again"


def test_plain_loss_ends_a_trial_early_and_chance_seldom_does() -> None:
    """On a clock that scatters by a tenth."""
    losing, equal = ([length_of_trial(DraftTrial(), factor, 0.1, seed) for seed in range(300)] for factor in (1.2, 1.0))
    assert fmean(losing) < 5.8
    assert sum(length < 8 for length in equal) < 0.13 * len(equal)


def test_trials_of_one_tenant_decide_nothing_for_another() -> None:
    trials = DraftTrials()
    lost = trials.of_step({"one"}, 1)
    for _ in range(100):
        if lost.begin_step() and lost.may_run(0.5):
            lost.observe_drafted(drafted(3 * PLAIN))
        elif lost.is_control:
            lost.observe_plain(PLAIN, PLAIN)
    assert not any(lost.begin_step() and lost.may_run(0.5) for _ in range(16)), "its drafts do not pay"
    assert trials.of_step({"two"}, 1).begin_step()
    assert trials.of_step({"one", "two"}, 2).begin_step()
    assert trials.of_step({"one"}, 1) is lost
    for index in range(5000):
        trials.of_step({str(index)}, 1)
    assert trials.of_step({"one"}, 1) is not lost, "they are bounded"
