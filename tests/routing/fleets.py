"""Fleets, reports and requests, made up and drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from lora_serve.core.replica_report import ReplicaReport
from lora_serve.routing.fleet_view import FleetView
from lora_serve.routing.routed_request import RoutedRequest

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


def digest_sets(min_size: int = 0) -> st.SearchStrategy[tuple[str, ...]]:
    sets = st.lists(st.sampled_from(DIGESTS), min_size=min_size, max_size=2, unique=True)
    return sets.map(lambda digests: tuple(sorted(digests)))


def requests() -> st.SearchStrategy[RoutedRequest]:
    return st.builds(
        RoutedRequest,
        st.uuids().map(str),
        digest_sets(),
        st.integers(1, 8000),
        st.integers(0, 2000),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
    )


@st.composite
def fleets(draw: st.DrawFn, min_size: int = 1) -> FleetView:
    """Any fleet: replicas with and without reports, with requests of this gateway under way."""
    names = draw(
        st.lists(st.text("abcdef0123456789", min_size=4, max_size=8), min_size=min_size, max_size=8, unique=True)
    )
    view = view_of(*names)
    digests = st.lists(st.sampled_from(DIGESTS), max_size=4, unique=True).map(tuple)
    for name in names:
        for sent in draw(st.lists(requests(), max_size=3)):
            view.sent(name, sent)
        if draw(st.booleans()):
            tiers = [draw(digests) for _ in range(3)]
            counts = [draw(st.integers(0, 9)) for _ in range(3)]
            view.update(ReplicaReport(name, 1.0, *tiers, 4, counts[0], counts[1], 1000 * counts[2]))
    return view
