"""First come, first served within a priority; a lower number runs first, as in vLLM."""

from __future__ import annotations

from lora_serve.engine.policies import base
from lora_serve.engine.sequence import Sequence


class Policy(base.Policy):
    """A preempted sequence keeps its place of arrival."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.request.priority, sequence.sequence_id)
