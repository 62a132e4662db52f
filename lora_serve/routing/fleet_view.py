"""A gateway's view of its fleet: each replica's last report, and what this gateway has sent there itself.

Gateways of one fleet do not talk to each other: each knows its own requests at once, and the others' by the reports.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from lora_serve.core.stats import ReplicaReport
from lora_serve.routing.request import RecentRoots, RoutedRequest

_LEARNING_RATE = 0.02


class Tier(enum.IntEnum):
    """The place of an adapter on a replica: the lower, the sooner a row can use it."""

    DEVICE = 0
    HOST = 1
    LOADING = 2
    NONE = 3


class ReplicaState:
    """Routers read it. The own requests are counted at once, other gateways' as the last report tells them."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.report: ReplicaReport | None = None  # None: none has come yet
        self._open: dict[str, RoutedRequest] = {}  # own, by request id
        self._in_prompt: dict[str, int] = {}  # of these, those without a first token: the prompt's tokens
        self._num_prompt = 0  # tokens: sums over these
        self._num_output = 0
        self._others_requests = 0
        self._others_tokens = 0
        self._tiers: dict[str, Tier] = {}
        self._roots: frozenset[int] = frozenset()
        self._sent_roots = RecentRoots()  # since the report

    @property
    def num_requests(self) -> int:
        """The requests under way there."""
        return len(self._open) + self._others_requests

    @property
    def load(self) -> int:
        """The tokens that are still to be computed there: prompts without a first token, and answers as expected."""
        return self._num_prompt + self._num_output + self._others_tokens

    def tier(self, digests: Iterable[str]) -> Tier:
        """The worst place of several adapters; DEVICE if there are none."""
        return max((self._tiers.get(digest, Tier.NONE) for digest in digests), default=Tier.DEVICE)

    def num_known_roots(self, roots: Iterable[int]) -> int:
        """The number of a prompt's beginnings that it has probably computed."""
        return sum(root in self._roots or root in self._sent_roots for root in roots)

    def take(self, report: ReplicaReport) -> None:
        """Takes in a report, unless a later one came first, or this one: it is sent again during a long step."""
        if self.report is not None and report.made_at <= self.report.made_at:
            return
        self.report = report
        self._tiers = _tiers_of(report)
        self._roots = frozenset(report.prefix_roots)
        self._sent_roots = RecentRoots()
        for request in self._open.values():  # the report may be older than they are
            self._note(request)
        self._others_requests = max(0, report.num_running + report.num_waiting - len(self._open))
        self._others_tokens = max(0, report.waiting_tokens - self._num_prompt) if self._others_requests else 0

    def sent(self, request: RoutedRequest) -> None:
        """Counts a request of this gateway."""
        self._open[request.request_id] = request
        self._in_prompt[request.request_id] = request.num_prompt
        self._num_prompt += request.num_prompt
        self._num_output += request.num_output
        self._note(request)

    def answering(self, request: RoutedRequest) -> None:
        """The first token came: the prompt is no work any more."""
        self._num_prompt -= self._in_prompt.pop(request.request_id, 0)

    def ended(self, request: RoutedRequest) -> None:
        """Counts the request no longer, however it ended."""
        self.answering(request)
        found = self._open.pop(request.request_id, None)
        self._num_output -= found.num_output if found is not None else 0

    def _note(self, request: RoutedRequest) -> None:
        """What the replica will have because of a request."""
        for digest in request.digests:
            self._tiers.setdefault(digest, Tier.LOADING)
        self._sent_roots.add(request.roots)


def _tiers_of(report: ReplicaReport) -> dict[str, Tier]:
    """The best place of each adapter."""
    tiers = dict.fromkeys(report.loading, Tier.LOADING)
    tiers |= dict.fromkeys(report.host, Tier.HOST)
    return tiers | dict.fromkeys(report.device, Tier.DEVICE)


class FleetView:
    """The states of the replicas that may be chosen: draining and dead ones are removed.

    Not thread-safe: one event loop uses it. Messages about a replica that is not (or no longer) one are ignored.
    """

    def __init__(self) -> None:
        self._states: dict[str, ReplicaState] = {}
        self._answer_tokens: float | None = None  # a running mean; None: no answer has ended yet

    @property
    def replicas(self) -> list[ReplicaState]:
        """All states, in the order in which they were added."""
        return list(self._states.values())

    def add(self, replica: str) -> None:
        """Takes in a replica; one that is known stays as it is."""
        self._states.setdefault(replica, ReplicaState(replica))

    def remove(self, replica: str) -> None:
        """Forgets a replica."""
        self._states.pop(replica, None)

    def update(self, report: ReplicaReport) -> None:
        """Takes in a report."""
        if report.replica in self._states:
            self._states[report.replica].take(report)

    def sent(self, replica: str, request: RoutedRequest) -> None:
        """Counts a request that this gateway has sent."""
        if replica in self._states:
            self._states[replica].sent(request)

    def answering(self, replica: str, request: RoutedRequest) -> None:
        """The request's first token came from the replica."""
        if replica in self._states:
            self._states[replica].answering(request)

    def ended(self, replica: str, request: RoutedRequest, num_output: int | None = None) -> None:
        """The request is over there: it ended well, with so many tokens, or badly, or its client left."""
        if replica in self._states:
            self._states[replica].ended(request)
        if num_output is not None:
            mean = num_output if self._answer_tokens is None else self._answer_tokens
            self._answer_tokens = mean + _LEARNING_RATE * (num_output - mean)

    def expected_output(self, max_tokens: int) -> int:
        """The tokens of an answer that may have so many, as the last answers tell."""
        return max_tokens if self._answer_tokens is None else min(max_tokens, round(self._answer_tokens))
