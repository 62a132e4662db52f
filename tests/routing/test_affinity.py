"""Affinity: few copies of an adapter, many of a hot one, and no replica much above the mean."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.routing.fleet_view import FleetView, RoutedRequest, Tier
from lora_serve.routing.routers import create_router
from lora_serve.routing.routers.affinity import BOUND, LOAD_TOKENS, limits
from tests.routing.fleets import DIGESTS, fleets, report, request, requests, view_of

NAMES = tuple(f"replica-{index}" for index in range(8))
LONG = 8192  # tokens of a prompt that no load of an adapter costs


def first(view: FleetView, asked: RoutedRequest) -> str:
    return create_router("affinity").choose(asked, view.replicas)[0]


def loaded(view: FleetView, replica: str, num_tokens: int) -> None:
    view.sent(replica, RoutedRequest(f"busy-{replica}-{num_tokens}", (), num_tokens))


@given(view=fleets(), asked=requests())
def test_no_replica_above_the_bound_gets_a_request(view: FleetView, asked: RoutedRequest) -> None:
    states = {state.replica: state for state in view.replicas}
    limit, stretched = limits(asked, view.replicas)
    chosen = states[first(view, asked)]
    assert chosen.load < (stretched if chosen.tier(asked.digests) is not Tier.NONE else limit)


@given(st.lists(requests(), min_size=1, max_size=60))
def test_loads_stay_within_the_bound_whatever_comes(asked: list[RoutedRequest]) -> None:
    view = view_of(*NAMES[:4])
    for each in asked:
        view.sent(first(view, each), each)
    largest = max(each.num_tokens for each in asked)
    mean = sum(state.load for state in view.replicas) / 4
    slack = max(LOAD_TOKENS, largest)  # no report has told what a load costs
    assert max(state.load for state in view.replicas) <= max(BOUND * mean, mean + slack) + largest


@given(st.integers(), st.sampled_from(NAMES))
def test_only_the_adapters_of_a_replica_that_leaves_move(number: int, leaving: str) -> None:
    asked = request(0, f"sha256:{number}")
    before = create_router("affinity").choose(asked, view_of(*NAMES).replicas)
    view = view_of(*NAMES)
    view.remove(leaving)
    after = create_router("affinity").choose(asked, view.replicas)
    assert after == [replica for replica in before if replica != leaving]


def test_adapters_are_shared_out_among_the_replicas() -> None:
    homes = Counter(first(view_of(*NAMES), request(0, f"sha256:{index}")) for index in range(800))
    assert set(homes) == set(NAMES)
    assert max(homes.values()) < 150


def test_rare_adapter_stays_on_one_replica_while_others_are_busy() -> None:
    view = view_of(*NAMES)
    homes = set()
    for number in range(100):
        noise = request(number, f"sha256:noise-{number}", num_prompt=300)
        view.sent(first(view, noise), noise)
        homes.add(first(view, request(1000 + number, "sha256:rare", num_prompt=300)))
    assert len(homes) == 1


def test_hot_adapter_spreads_over_as_many_replicas_as_its_load_needs() -> None:
    view = view_of(*NAMES)
    for number in range(64):
        hot = request(number, "sha256:hot", num_prompt=LONG)
        view.sent(first(view, hot), hot)
    loads = sorted(state.load // LONG for state in view.replicas)
    most = math.ceil(BOUND * 64 / 8)
    assert loads == [0, 64 - 6 * most, *[most] * 6]


def test_hot_adapter_goes_back_to_its_home_when_it_cools() -> None:
    view, sent = view_of(*NAMES), []
    home = first(view, request(0, "sha256:hot"))
    for number in range(16):
        hot = request(number, "sha256:hot", num_prompt=LONG)
        sent.append((first(view, hot), hot))
        view.sent(*sent[-1])
    assert len({replica for replica, _ in sent}) > 1
    for replica, hot in sent:
        view.ended(replica, hot)
    assert first(view, request(99, "sha256:hot")) == home


@pytest.mark.parametrize("place", ["device", "host", "loading"])
def test_replica_that_has_the_adapter_is_preferred_to_its_home(place: str) -> None:
    view = view_of(*NAMES)
    asked = request(0, DIGESTS[0])
    *_, last = create_router("affinity").choose(asked, view.replicas)
    view.update(report(last, **{place: (DIGESTS[0],)}))
    assert first(view, asked) == last
    loaded(view, last, LONG)
    assert first(view, asked) != last


def test_request_of_two_adapters_goes_where_both_are() -> None:
    view = view_of("a", "b", "c")
    view.update(report("a", device=("x",)))
    view.update(report("b", device=("y",)))
    view.update(report("c", host=("x", "y")))
    assert first(view, request(0, "x", "y")) == "c"


def test_prefix_is_found_again_among_replicas_that_have_the_adapter() -> None:
    view = view_of(*NAMES)
    order = create_router("affinity").choose(request(0, "x"), view.replicas)
    for replica in order:
        view.update(report(replica, host=("x",)))
    view.update(report(order[3], 2.0, host=("x",), prefix_roots=(7,)))
    view.update(report(order[5], 2.0, host=("x",), prefix_roots=(7, 8)))
    assert first(view, request(1, "x", roots=(7, 8, 9))) == order[5]
    assert first(view, request(2, "x", roots=(7,))) in (order[3], order[5])
    assert first(view, request(3, "x", roots=(1,))) == order[0]
    loaded(view, order[5], LONG)
    assert first(view, request(4, "x", roots=(7, 8, 9))) == order[3]


def test_base_model_goes_to_its_prefix_and_else_to_the_least_loaded() -> None:
    view = view_of("a", "b", "c")
    for replica, tokens in (("a", 500), ("b", 100), ("c", 300)):
        loaded(view, replica, tokens)
    assert first(view, request(1)) == "b"
    assert first(view, request(1, roots=(7,))) == "b"
    view.update(report("c", num_running=1, waiting_tokens=300, prefix_roots=(7,)))
    assert first(view, request(2, roots=(7, 8))) == "c"


def test_replica_that_has_the_adapter_keeps_it_while_a_load_would_cost_more_than_waiting() -> None:
    view = view_of(*NAMES)
    home = first(view, request(0, "x"))
    loaded(view, home, 900)
    assert first(view, request(1, "x")) != home  # nobody has it: a load is due anywhere
    view.update(report(home, host=("x",), load_tokens=6000))
    assert first(view, request(2, "x")) == home
    view.update(report(home, 2.0, host=("x",), load_tokens=300))
    assert first(view, request(3, "x")) != home


def test_second_copy_takes_over_before_a_load_would_pay() -> None:
    view = view_of(*NAMES)
    home, *_, other = create_router("affinity").choose(request(0, "x"), view.replicas)
    for replica in (home, other):
        view.update(report(replica, device=("x",), load_tokens=6000))
    loaded(view, home, 900)
    assert first(view, request(1, "x")) == other


def test_adapter_that_nobody_has_goes_where_it_pushes_no_other_out() -> None:
    view = view_of(*NAMES)
    order = create_router("affinity").choose(request(0, "x"), view.replicas)
    for replica in order[:2]:
        view.update(report(replica, is_host_full=True))
    assert first(view, request(1, "x")) == order[2]
    for replica in order:
        view.update(report(replica, 2.0, is_host_full=True))
    assert first(view, request(2, "x")) == order[0]
