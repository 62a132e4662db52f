"""One sequence's drafts: from its own tokens and from ngrams, each as far as it is likely to be right."""

from __future__ import annotations

import random

import pytest

from lora_serve.engine.acceptance import SHARE, Acceptance, AcceptanceByOwner, DraftBudget
from lora_serve.engine.drafter import Drafter, NgramCache, NgramCaches

FORM = [31, 32, 33, 34, 35, 36]  # what every answer of an adapter begins with


def drafter(tokens: list[int], ngrams: NgramCache | None = None, acceptance: Acceptance | None = None) -> Drafter:
    found = Drafter(tokens, NgramCache() if ngrams is None else ngrams, acceptance or Acceptance())
    found.read(len(tokens))
    return found


def test_prompt_is_copied() -> None:
    found = drafter([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3])
    rates = found.draft(4, 0.0)
    assert found.take(4) == (4, 5, 6, 7)
    assert rates == sorted(rates, reverse=True)


def test_draft_goes_on_over_its_own_tokens() -> None:
    found = drafter([8, 1, 2, 1, 2, 1, 2])
    found.draft(6, 0.0)
    assert found.take(6) == (1, 2, 1, 2, 1, 2)


def test_draft_ends_where_it_is_not_likely_enough_and_before_the_end_of_the_output() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]
    rates = drafter(tokens).draft(16, 0.0)
    assert drafter(tokens).draft(16, rates[2]) == rates[:2]
    ended = Drafter(tokens, NgramCache(), Acceptance(), ends=(6,))
    ended.read(len(tokens))
    ended.draft(16, 0.0)
    assert ended.take(16) == (4, 5)


def test_more_tokens_that_match_promise_more_before_anything_was_learned() -> None:
    promised = []
    for num_matched in range(1, 7):
        known = list(range(1, num_matched + 1))
        found = drafter([50, 51, *known, 9, 60, 61, *known])
        promised += found.draft(1, 0.0)
        assert found.take(1) == (9,)
    assert promised == sorted(promised)
    assert promised[0] < 0.2 < 0.5 < promised[-1] < 1.0


@pytest.mark.parametrize("ends", [(), (4,)], ids=["a token", "the end"])
def test_guess_that_failed_is_trusted_less_but_for_an_end_which_is_never_drafted(ends: tuple[int, ...]) -> None:
    tokens, acceptance = [1, 2, 3, 4, 9, 1, 2, 3], Acceptance()
    before = drafter(tokens, acceptance=acceptance).draft(1, 0.0)
    one = Drafter(tokens, NgramCache(), acceptance, ends)
    one.read(len(tokens))
    one.draft(1, 0.0)
    tokens.append(5)
    one.learn(len(tokens) - 1, is_last=False)
    after = drafter(tokens[:-1], acceptance=acceptance).draft(1, 0.0)
    assert (after < before) == (not ends)
    assert (after == before) == bool(ends)


def test_form_of_earlier_answers_is_guessed_where_the_prompt_does_not_hold_it() -> None:
    ngrams, acceptance = NgramCache(), Acceptance()
    for name in range(100, 110):
        tokens = [5, 6, 7]
        one = drafter(tokens, ngrams, acceptance)
        for token in (*FORM, name):
            one.read(10)
            one.draft(8, 1.0)
            tokens.append(token)
            one.learn(len(tokens) - 1, is_last=token == name)
    found = drafter([5, 6, 7], ngrams, acceptance)
    rates = found.draft(16, 0.0)
    assert found.take(16)[: len(FORM)] == tuple(FORM)
    assert rates[len(FORM) - 1] > 0.2
    assert rates[len(FORM)] < 0.5 * rates[len(FORM) - 1], "the name is another each time"


def test_rates_are_learned_from_guesses_that_were_not_run() -> None:
    generator = random.Random(1)
    tokens = [generator.randrange(8) for _ in range(30)]
    found = drafter(tokens)
    for _ in range(400):
        found.read(10)
        found.draft(8, 0.4)
        found.take(0)
        tokens.append(generator.randrange(8))
        found.learn(len(tokens) - 1, is_last=False)
    found.read(10)
    assert found.draft(8, 0.4) == [], "one token in eight comes true"
    while len(tokens) < 600:  # a text that repeats itself now
        found.read(10)
        found.draft(8, 0.4)
        found.take(0)
        tokens.append(len(tokens) % 8)
        found.learn(len(tokens) - 1, is_last=False)
    found.read(10)
    assert len(found.draft(8, 0.4)) > 2


def test_looks_take_no_more_than_was_paid_in() -> None:
    one = DraftBudget()
    num_looks, num_steps, seconds = 0, 20_000, 2e-3
    for _ in range(num_steps):
        one.seconds += SHARE * seconds
        if one.seconds > 0:
            one.pay_lookup(0, 1)
            num_looks += 1
    assert 1.1 > num_looks * 28e-6 / (0.002 * num_steps * seconds + 1e-2) > 0.9  # 10 ms is what an account begins with
    one.earn(-1.0)
    assert one.seconds > -1e-3, "one step that took long empties no account"
    one.earn(1.0)
    one.pay_lookup(0, 1)
    assert one.seconds < 2e-2, "little is saved up for later"


def test_tables_are_bounded() -> None:
    ngrams = NgramCache()
    for token in range(40_000):
        ngrams.learn(token, token + 1, token + 2, 0)
    assert 2 * 7168 <= len(ngrams) <= 2 * 8192
    assert ngrams.after(39_999, 40_000, 40_001) == ((0, 0), (0, 0))
    assert ngrams.after(0, 1, 2) == (None, None)
    owners, adapters = NgramCaches(), AcceptanceByOwner()
    first = owners.of(("t", ("a",)))
    assert owners.of(("t", ("a",))) is first
    for index in range(2000):
        owners.of(("t", (str(index),)))
    assert owners.of(("t", ("a",))) is not first
    kept = adapters.of(("t", ("a",)))
    for index in range(5000):
        adapters.of(("t", (str(index),)))
    assert adapters.of(("t", ("a",))) is not kept


def test_habits_of_all_owners_are_counted_as_they_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_serve.engine.drafter._MAX_ALL", 1000)
    owners, known = NgramCaches(), {}
    for index in range(200):
        known[index] = owners.of((str(index % 50), ()))
        for token in range(index % 7 * 20):
            known[index].learn(index, token, token + 1, token % 5)
            known[index // 2].learn(token, index, token, 0)  # also one that was forgotten and is in use still
        owners.of((str(index % 50), ()))
        kept = owners._owners.values()
        assert owners._tally.num_ngrams == sum(map(len, kept))
        assert owners._tally.num_ngrams <= 1000 or len(kept) == 1
    counted: list[NgramCache] = []
    monkeypatch.setattr(NgramCache, "__len__", lambda ngrams: counted.append(ngrams) or 0)
    owners.of(("0", ()))
    assert not counted, "a request costs the same however many owners there are"
