"""A gateway's view of its fleet.

Gateways of one fleet do not talk to each other: each knows its own requests at once, and the others' by the reports.
"""

from __future__ import annotations

from lora_serve.core.replica_report import ReplicaReport
from lora_serve.routing.replica_state import ReplicaState
from lora_serve.routing.routed_request import RoutedRequest

_LEARNING_RATE = 0.02


class FleetView:
    """The states of the replicas that may be chosen: draining and dead ones are removed.

    Not thread-safe: one event loop uses it. What is told of a replica that is not (or no longer) one is ignored.
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
