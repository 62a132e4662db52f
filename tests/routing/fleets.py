"""Fleets, reports and requests, made up and drawn."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from lora_serve.core.stats import ReplicaReport
from lora_serve.routing.fleet_view import FleetView, RoutedRequest

DIGESTS = tuple(f"sha256:{index:064x}" for index in range(12))


def view_of(*replicas: str) -> FleetView:
    view = FleetView()
    for replica in replicas:
        view.add(replica)
    return view


def report(replica: str, made_at: float = 1.0, **fields: Any) -> ReplicaReport:
    return ReplicaReport(replica, made_at, **fields)


def request(number: int = 0, *digests: str, **fields: Any) -> RoutedRequest:
    return RoutedRequest(f"r{number}", digests, **{"num_prompt": 100, **fields})


def requests() -> st.SearchStrategy[RoutedRequest]:
    return st.integers(0, 2**32).map(lambda seed: made_up(random.Random(seed)))


def made_up(chance: random.Random) -> RoutedRequest:
    digests = tuple(sorted(chance.sample(DIGESTS, chance.randrange(3))))
    roots = tuple(chance.randrange(10) for _ in range(chance.randrange(5)))
    return RoutedRequest(f"{chance.getrandbits(64):x}", digests, chance.randint(1, 8000), chance.randrange(2000), roots)


@st.composite
def fleets(draw: st.DrawFn, min_size: int = 1) -> FleetView:
    """Any fleet: replicas with and without reports, with requests of this gateway under way."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    view = view_of(*(f"{chance.getrandbits(32):08x}" for _ in range(draw(st.integers(min_size, 8)))))
    for state in view.replicas:
        for _ in range(chance.randrange(4)):
            view.sent(state.replica, made_up(chance))
        if chance.random() < 0.5:
            tiers = [tuple(chance.sample(DIGESTS, chance.randrange(5))) for _ in range(3)]
            num_running, num_waiting = chance.randrange(10), chance.randrange(10)
            view.update(ReplicaReport(state.replica, 1.0, *tiers, 4, num_running, num_waiting, chance.randrange(9000)))
    return view
