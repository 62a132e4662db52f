"""First come, first served within a priority; a lower number runs first, as in vLLM."""

from __future__ import annotations

from lora_serve.engine.policies import base


class Policy(base.Policy):
    """The base as it is: a preempted sequence keeps its place; a low priority waits `max_wait` at most."""
