"""Earliest deadline first (Liu and Layland, JACM 1973); requests that can no longer meet theirs are refused at once.

Without the refusal an overloaded queue would serve requests that are about to miss their deadlines, and all would.
"""

from __future__ import annotations

import math

from lora_serve.core.batch import StepLoad
from lora_serve.core.errors import CapacityError, LoraServeError, RequestTimeoutError
from lora_serve.engine.policies import base
from lora_serve.engine.sequence import Sequence

_ENOUGH_STEPS = 64  # observed before an estimate refuses a request
_MAX_RETRY_AFTER = 30.0  # seconds


class Policy(base.Policy):
    """Requests without a deadline come last, in order of arrival, until they have waited `max_wait`."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        deadline = sequence.request.deadline
        return (math.inf if deadline is None else deadline, sequence.request.priority, sequence.sequence_id)

    def refusal(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """Refuses a request with less time left than its work takes at least.

        A client that gave too little time from the start can only give more: it gets the timeout's own error. A request
        that lost its time in the queue may come again: it gets a CapacityError, after as long as it has waited.
        """
        deadline = sequence.request.deadline
        if deadline is None or now >= deadline or self.view.cost.num_observed < _ENOUGH_STEPS:
            return None
        if deadline - now >= self._least_seconds(sequence, 0):
            return None
        least = self._least_seconds(sequence, self.view.num_known(sequence))
        if deadline - now >= least:
            return None
        given, waited = deadline - sequence.request.arrival_time, now - sequence.request.arrival_time
        if given < least:
            return RequestTimeoutError(
                f"The request's timeout_ms leaves it {1000 * given:.0f} ms, and on an idle server it takes "
                f"{1000 * least:.0f} ms at least; allow more."
            )
        return CapacityError(
            "The server is too busy to answer within the request's timeout_ms; try again later.",
            retry_after=min(max(waited, 1.0), _MAX_RETRY_AFTER),
        )

    def _least_seconds(self, sequence: Sequence, num_known: int) -> float:
        """The time of the request alone on the device: its prompt in one step, then the tokens that it cannot end
        before.
        """
        num_prompt, num_adapters = sequence.num_prompt, len(sequence.adapters)
        seconds = self.view.cost.seconds(StepLoad(num_prompt - num_known, 1, num_adapters, num_prompt))
        num_steps = sequence.request.sampling.min_tokens - 1
        if sequence.is_pooling or num_steps <= 0:
            return seconds
        return seconds + num_steps * self.view.cost.seconds(StepLoad(1, 1, num_adapters, num_prompt))
