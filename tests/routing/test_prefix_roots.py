"""Roots of prompts: equal for equal beginnings of one tenant under equal adapters, unlike for all others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.request import AdapterUse, InferenceRequest, PoolingParams
from lora_serve.routing.fleet_view import RecentRoots, prefix_roots, routed

KEY = b"the fleet's"
REF = AdapterRef("acme", "acme/support", 1, "sha256:1", 8, 100)
BASE = InferenceRequest("1", tuple(range(300)), adapters=(AdapterUse(REF),), tenant="acme")


@pytest.mark.parametrize(
    ("length", "number"), [(63, 0), (64, 1), (255, 1), (256, 2), (1024, 3), (4096, 4), (70_000, 4)]
)
def test_roots_are_those_of_64_tokens_and_four_times_as_many_each(length: int, number: int) -> None:
    assert len(prefix_roots(replace(BASE, prompt_token_ids=tuple(range(length))), KEY)) == number


@given(st.integers(0, 299), st.integers(1, 50_000))
def test_changed_token_changes_the_roots_of_beginnings_that_hold_it(position: int, added: int) -> None:
    tokens = list(BASE.prompt_token_ids)
    tokens[position] += added
    same = [
        a == b
        for a, b in zip(
            prefix_roots(replace(BASE, prompt_token_ids=tuple(tokens)), KEY), prefix_roots(BASE, KEY), strict=True
        )
    ]
    assert same == [position >= 64, position >= 256]


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, tenant="other"),
        replace(BASE, cache_scope="acme, made again"),
        replace(BASE, adapters=()),
        replace(BASE, adapters=(AdapterUse(REF, scale=0.5),)),
        replace(BASE, adapters=(AdapterUse(REF, start=10),)),
        replace(BASE, adapters=(AdapterUse(replace(REF, digest="sha256:2")),)),
    ],
    ids=["tenant", "scope", "base", "scale", "start", "digest"],
)
def test_other_owner_or_other_adapters_share_no_root(other: InferenceRequest) -> None:
    assert not set(prefix_roots(other, KEY)) & set(prefix_roots(BASE, KEY))


def test_adapter_that_acts_later_is_not_in_the_roots_before_it() -> None:
    late = replace(BASE, adapters=(AdapterUse(REF, start=100),))
    base = replace(BASE, adapters=())
    same = [a == b for a, b in zip(prefix_roots(late, KEY), prefix_roots(base, KEY), strict=True)]
    assert same == [True, False]


def test_roots_say_nothing_without_the_key() -> None:
    assert not set(prefix_roots(BASE, KEY)) & set(prefix_roots(BASE, b"a guess"))


def test_request_that_leaves_no_keys_and_values_has_no_roots() -> None:
    assert prefix_roots(replace(BASE, pooling=PoolingParams()), KEY) == ()
    assert routed(BASE, None).roots == ()


def test_request_is_known_by_its_adapters_and_its_tokens() -> None:
    twice = replace(BASE, adapters=(AdapterUse(replace(REF, digest="sha256:9")), AdapterUse(REF), AdapterUse(REF, 0.5)))
    found = routed(twice, KEY, num_output=40)
    assert (found.digests, found.num_prompt, found.num_tokens) == (("sha256:1", "sha256:9"), 300, 340)
    assert found.roots == prefix_roots(twice, KEY)


def test_the_longest_unused_root_is_forgotten_first() -> None:
    recent = RecentRoots(most=3)
    recent.add([1, 2])
    recent.add([3])
    recent.add([1])
    recent.add([4])
    assert recent.roots == (3, 1, 4)
