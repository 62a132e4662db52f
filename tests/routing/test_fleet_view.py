"""A gateway's count of its own requests and of others', and what it takes replicas to have."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.figures import TierStats
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.core.stats import BatcherStats, EngineStats, ReplicaReport, SlotInfo, report_of
from lora_serve.routing.fleet_view import ReplicaView, Tier
from tests.routing.fleets import report, request, requests, view_of


def state_of(*reports: ReplicaReport) -> ReplicaView:
    view = view_of("a")
    for each in reports:
        view.update(each)
    return view.replicas[0]


@given(st.lists(st.tuples(requests(), st.integers(0, 2)), unique_by=lambda pair: pair[0].request_id))
def test_load_is_what_is_under_way(sent: list) -> None:
    """Stage 0: sent; 1: its first token came; 2: ended, with or without one."""
    view = view_of("a")
    for each, stage in sent:
        view.sent("a", each)
        if stage == 1 or (stage == 2 and each.num_prompt % 2):
            view.answering("a", each)
        if stage == 2:
            view.ended("a", each)
    (state,) = view.replicas
    assert state.num_requests == sum(stage < 2 for _, stage in sent)
    assert state.load == sum(each.num_output + each.num_prompt * (stage == 0) for each, stage in sent if stage < 2)


def test_end_that_is_told_twice_counts_once() -> None:
    view = view_of("a")
    view.sent("a", request(1))
    for _ in range(2):
        view.answering("a", request(1))
        view.ended("a", request(1))
    assert (view.replicas[0].load, view.replicas[0].num_requests) == (0, 0)


def test_others_requests_are_those_of_the_report_beyond_the_own() -> None:
    view = view_of("a")
    view.sent("a", request(1))
    view.update(report("a", num_running=2, num_waiting=3, waiting_tokens=900))
    (state,) = view.replicas
    assert (state.num_requests, state.load) == (5, 900)
    view.ended("a", request(1))
    assert (state.num_requests, state.load) == (4, 800)
    view.update(report("a", 2.0))
    assert (state.num_requests, state.load) == (0, 0)


def test_adapter_is_where_the_report_has_it_best() -> None:
    state = state_of(report("a", device=("x",), host=("x", "y"), loading=("z",)))
    assert [state.tier([digest]) for digest in ("x", "y", "z", "w")] == [
        Tier.DEVICE,
        Tier.HOST,
        Tier.LOADING,
        Tier.NONE,
    ]
    assert state.tier(["x", "y"]) is Tier.HOST
    assert state.tier([]) is Tier.DEVICE


def test_what_was_sent_since_the_report_is_on_its_way() -> None:
    view = view_of("a")
    view.sent("a", request(1, "x", roots=(7,)))
    (state,) = view.replicas
    assert state.tier(["x"]) is Tier.LOADING
    view.update(report("a"))  # made before the request came there
    assert state.tier(["x"]) is Tier.LOADING
    assert state.num_known_roots((7, 8)) == 1
    view.ended("a", request(1, "x"))
    view.update(report("a", 2.0))  # and by now it was evicted
    assert state.tier(["x"]) is Tier.NONE
    assert state.num_known_roots((7, 8)) == 0


def test_older_report_that_comes_late_is_ignored() -> None:
    assert state_of(report("a", 2.0, device=("x",)), report("a", 1.0)).tier(["x"]) is Tier.DEVICE


def test_report_that_is_told_again_takes_nothing_away() -> None:
    """As during a long step, in which no new one is made."""
    view, before = view_of("a"), report("a", num_running=1)
    view.update(before)
    view.sent("a", replace(request(roots=(7,)), num_output=5))
    view.ended("a", request())
    view.update(before)
    assert view.replicas[0].num_known_roots((7,)) == 1


def test_replica_that_is_not_one_is_ignored() -> None:
    view = view_of("a")
    view.remove("a")
    view.update(report("a"))
    view.sent("a", request(1))
    view.answering("a", request(1))
    view.ended("a", request(1))
    assert view.replicas == []
    view.add("a")
    view.sent("a", request(2))
    view.add("a")
    assert view.replicas[0].num_requests == 1


def test_report_is_the_engines_figures_and_crosses_as_messagepack() -> None:
    slots = (SlotInfo(0, 3, "sha256:d", "acme/support", 100, 1, False),)
    stats = EngineStats(
        2, 3, (), (), 4, 100, 40, 16, 0, slots, ("sha256:d", "sha256:h"), ("sha256:l",),
        num_waiting_tokens=700, num_running_tokens=90,
    )  # fmt: skip
    made = report_of("a", 5.0, stats, (1, 2**64 - 1))
    assert (made.device, made.host, made.loading) == (("sha256:d",), ("sha256:d", "sha256:h"), ("sha256:l",))
    assert (made.max_loras, made.num_running, made.num_waiting) == (4, 2, 3)
    assert (made.waiting_tokens, made.running_tokens, made.num_blocks, made.num_free_blocks) == (700, 90, 100, 40)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=ReplicaReport) == made


def test_load_is_told_in_tokens_of_its_time() -> None:
    tiers = {"host": TierStats(0, 4, 4, 0, 2.0, None, 0)}
    batcher = BatcherStats(BatchLimits(max_num_seqs=4, max_num_batched_tokens=64), 4, 64, 0.0, cost={"token": 0.001})
    stats = EngineStats(0, 0, (), (), 4, 100, 40, 16, 0, (), (), (), tiers=tiers, batcher=batcher)
    assert report_of("a", 5.0, stats).load_tokens == 500
    assert report_of("a", 5.0, replace(stats, tiers={"host": TierStats(0, 0, 0, 0, 0.0, None, 0)})).load_tokens == 0
    assert report_of("a", 5.0, replace(stats, batcher=None)).load_tokens == 0


def test_answers_are_expected_to_be_as_long_as_the_last_ones() -> None:
    view = view_of("a")
    assert view.expected_output(500) == 500
    for number in range(300):
        view.ended("a", request(number), 40 if number else 400)
    assert (view.expected_output(500), view.expected_output(10)) == (41, 10)
    view.ended("a", request(0))  # its client left: it says nothing of answers
    assert view.expected_output(500) == 41


def test_host_memory_is_full_once_one_more_adapter_of_the_mean_size_does_not_fit() -> None:
    stats = EngineStats(0, 0, (), (), 4, 100, 40, 16, 0, (), (), ())
    for num_bytes, is_full in ((0, False), (300, False), (301, True)):
        tiers = {"host": TierStats(0, 3, 3, 0, 2.0, num_bytes, 400, 3)}
        assert report_of("a", 5.0, replace(stats, tiers=tiers)).is_host_full is is_full
