"""What tests of policies share: sequences that wait, and a world whose steps take time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.engine.policies import create_policy
from lora_serve.engine.policies.base import Policy, PolicyView
from lora_serve.engine.sequence import Sequence
from tests.engine.world import VirtualClock, World

STEP = 0.01  # seconds


def waiting(
    number: int, ref: AdapterRef | None = None, prompt_tokens: int = 4, max_tokens: int = 5, **fields: Any
) -> Sequence:
    """A sequence as the scheduler hands it to a policy; it arrived at `arrival_time`."""
    uses = () if ref is None else (AdapterUse(ref),)
    prompt = tuple(range(prompt_tokens))
    request = InferenceRequest(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens), uses, **fields)
    since = request.arrival_time
    return Sequence(number, request, 0, list(prompt), uses, request.fallback, waiting_since=since)


def policy_of(name: str, **view: Any) -> Policy:
    return create_policy(name, PolicyView(**view))


def ids(policy: Policy, now: float = 0.0) -> list[int]:
    """The order, as numbers."""
    return [sequence.sequence_id for sequence in policy.order(now)]


def timed_world(policy: str, num_blocks: int = 2000, seconds: Callable[[Batch], float] | None = None, **settings: Any):
    """A world whose clock runs `seconds` during each step; its settings' times are milliseconds as ever."""
    clock = VirtualClock()
    world = World(num_blocks, clock=clock, policy=policy, **settings)
    run = world.runner.run

    def run_timed(batch: Batch) -> list[RowOutput]:
        outputs = run(batch)
        clock.now += STEP if seconds is None else seconds(batch)
        return outputs

    world.runner.run = run_timed  # type: ignore[method-assign]
    return world, clock
