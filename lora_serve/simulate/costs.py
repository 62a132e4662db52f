"""Times: steps by a model of the hardware or learned from a server's, transfers by size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_serve.core.batch import StepLoad
from lora_serve.engine.batching.step_cost import StepCost

_NUM_PASSES = 4  # over the recorded steps


class StepTime(Protocol):
    """The time of a step."""

    def seconds(self, load: StepLoad) -> float:
        """The seconds of one step of this load."""


@dataclass(frozen=True, slots=True)
class RooflineSteps:
    """A model, not a measurement: a step is limited by bytes or by arithmetic, whichever takes longer.

        seconds = overhead + max(bytes / (bandwidth * e_m), flops / (peak * e_c))
        bytes = weights + KV bytes read + adapters' bytes, each once per step
        flops = 2 * (parameters + adapter parameters) * tokens

    (Williams et al., "Roofline", CACM 2009.) Left out: attention's own arithmetic (7 % of an 8B model's at a context of
    4 000), and everything between kernels, for which `overhead_seconds` and the two efficiencies stand.
    """

    num_parameters: float
    weight_bytes: float
    kv_bytes_per_token: float
    adapter_bytes: float
    bytes_per_second: float  # of the device's memory
    flops_per_second: float  # dense, of the weights' type
    memory_efficiency: float
    compute_efficiency: float
    overhead_seconds: float

    def seconds(self, load: StepLoad) -> float:
        num_bytes = self.weight_bytes + load.num_kv_read * self.kv_bytes_per_token
        num_bytes += load.num_adapters * self.adapter_bytes
        flops = 2 * load.num_tokens * (self.num_parameters + self.adapter_bytes / 2)  # 2 bytes per adapter parameter
        by_memory = num_bytes / (self.bytes_per_second * self.memory_efficiency)
        by_compute = flops / (self.flops_per_second * self.compute_efficiency)
        return self.overhead_seconds + max(by_memory, by_compute)


class LearnedSteps:
    """The server's own `StepCost`, trained on recorded steps."""

    def __init__(self, samples: Sequence[tuple[StepLoad, float]]) -> None:
        self._cost = StepCost()
        self._least = min(seconds for _, seconds in samples)
        shuffled = list(samples)
        generator = random.Random(0)  # noisy phases of the recording shall not be its last word
        for _ in range(_NUM_PASSES):
            generator.shuffle(shuffled)
            for load, seconds in shuffled:
                self._cost.observe(load, seconds)

    def seconds(self, load: StepLoad) -> float:
        return max(self._least / 2, self._cost.seconds(load))


@dataclass(frozen=True, slots=True)
class TransferTime:
    """seconds = per_load + bytes / bytes_per_second."""

    per_load: float
    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        """The seconds of one transfer."""
        return self.per_load + num_bytes / self.bytes_per_second
