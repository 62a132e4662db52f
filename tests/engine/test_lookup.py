"""Guesses by look-up, against a plain scan of the whole sequence."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.engine.acceptance import LONGEST_MATCH
from lora_serve.engine.drafter import PromptLookup


def num_matched(tokens: list[int], position: int) -> int:
    """The tokens before the position that are equal to the newest ones, by definition."""
    count = 0
    while count < min(position, LONGEST_MATCH) and tokens[position - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.lists(st.integers(1, 9), max_size=8))
def test_guess_is_the_place_that_most_of_the_newest_tokens_led_to(tokens: list[int], reads: list[int]) -> None:
    lookup = PromptLookup(tokens)
    for most in reads:
        lookup.read(most)
    lookup.read(len(tokens))
    assert lookup.num_missing == 0
    guess = lookup.guess()
    known = {position: num_matched(tokens, position) for position in range(1, len(tokens))}
    if guess is None:
        assert not any(known.values())
        return
    assert known[guess.position] == guess.num_matched
    last = sorted(position for position, count in known.items() if count >= min(2, max(known.values())))[-8:]
    assert guess.num_matched == max(known[position] for position in last), "the longest of the last eight places"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 40))
def test_part_of_an_index_guesses_from_what_it_has_read(tokens: list[int], most: int) -> None:
    lookup = PromptLookup(tokens)
    lookup.read(most)
    guess = lookup.guess()
    if guess is not None:
        assert guess.position <= most
        assert num_matched(tokens, guess.position) == guess.num_matched


def test_index_grows_with_its_sequence() -> None:
    tokens = [1, 2, 3]
    lookup = PromptLookup(tokens)
    lookup.read(100)
    assert lookup.guess() is None
    tokens += [9, 1, 2]
    assert lookup.num_missing == 3
    lookup.read(100)
    guess = lookup.guess()
    assert guess == (2, 2)
    assert [lookup.token_at(2 + place, [3, 9, 1, 2, 3]) for place in range(7)] == [3, 9, 1, 2, 3, 9, 1]


@pytest.mark.parametrize(
    ("tokens", "num_places"),
    [([7, 7] * 20, 1), ([1, 2, 3, 1, 2, 4, 1, 2], 2)],
    ids=["the longest match", "the first place"],
)
def test_search_ends_where_nothing_better_can_come(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], num_places: int
) -> None:
    lookup, compared = PromptLookup(tokens), list[int]()
    compare = lookup._num_matched
    monkeypatch.setattr(lookup, "_num_matched", lambda position: compared.append(position) or compare(position))
    lookup.read(len(tokens))
    lookup.guess()
    assert len(compared) == num_places


def test_work_does_not_grow_with_the_sequence() -> None:
    """Of the same few tokens over and over, the worst case of a chain."""
    times = {}
    for length in (2_000, 200_000):
        tokens = [place % 2 for place in range(length)]
        lookup = PromptLookup(tokens)
        while lookup.num_missing:
            lookup.read(1024)
        start = time.process_time()
        for place in range(2_000):
            tokens.append(place % 2)
            lookup.read(1024)
            lookup.guess()
        times[length] = time.process_time() - start
    assert times[200_000] < 10 * times[2_000]
