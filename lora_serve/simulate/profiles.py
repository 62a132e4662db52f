"""A machine with a model on it, as a JSON file of `profiles/` or the caller's: limits, costs, and their source.

`steps` is {"roofline": {...}}, a model of hardware, or {"recorded": [[tokens, rows, adapters, KV tokens read, seconds],
...]}, steps of a real server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lora_serve.core.batch import StepLoad
from lora_serve.core.errors import ConfigError
from lora_serve.engine.step_cost import StepCost

_NUM_PASSES = 4  # over the recorded steps
_FOLDER = Path(__file__).with_name("profiles")


class StepTime(Protocol):
    def seconds(self, load: StepLoad) -> float: ...


@dataclass(frozen=True, slots=True)
class RooflineSteps:
    """A model, not a measurement: a step is limited by bytes or by arithmetic, whichever takes longer.

        seconds = overhead + max(bytes / (bandwidth * e_m), flops / (peak * e_c), launches)
        bytes = weights + KV bytes read + adapters' bytes, each once per step
        flops = 2 * (parameters + adapter parameters) * tokens

    (Williams et al., "Roofline", CACM 2009.) Left out: attention's own arithmetic (7 % of an 8B model's at a context of
    4 000), and everything between kernels, for which `overhead_seconds` and the two efficiencies stand. `launches`:
    what the host needs for a step with prompts of more than `captured_tokens`, which is no captured graph.
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
    captured_tokens: int = 0
    launch_seconds: float = 0.0
    adapter_launch_seconds: float = 0.0  # beside these, if a row has an adapter

    def seconds(self, load: StepLoad) -> float:
        num_bytes = self.weight_bytes + load.num_kv_read * self.kv_bytes_per_token
        num_bytes += load.num_adapters * self.adapter_bytes
        flops = 2 * load.num_tokens * (self.num_parameters + self.adapter_bytes / 2)  # 2 bytes per adapter parameter
        by_memory = num_bytes / (self.bytes_per_second * self.memory_efficiency)
        by_compute = flops / (self.flops_per_second * self.compute_efficiency)
        launches = self.launch_seconds + self.adapter_launch_seconds * (load.num_adapters > 0)
        is_captured = load.num_prompt_tokens <= self.captured_tokens
        return self.overhead_seconds + max(by_memory, by_compute, 0.0 if is_captured else launches)


class LearnedSteps:
    """The server's own `StepCost`, trained on recorded steps."""

    def __init__(self, samples: Sequence[tuple[StepLoad, float]]) -> None:
        self._cost = StepCost()
        self._least = min(seconds for _, seconds in samples)
        shuffled = list(samples)
        generator = random.Random(0)  # so that a noisy phase of the recording does not come last
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
        return self.per_load + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Profile:
    """The facts of one replica."""

    name: str
    source: str  # where the figures are from, for the report
    steps: StepTime
    copy: TransferTime  # host memory to a device slot, on the engine's thread
    disk: TransferTime  # local disk to host memory, on a loader's thread
    remote: TransferTime  # a shared store to host memory, likewise, the first time on a replica
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    adapter_bytes: int
    adapter_rank: int
    max_loras: int
    host_bytes: int
    disk_bytes: int
    load_threads: int
    device: str = "cpu"

    def changed(self, **changes: Any) -> Profile:
        """The profile with other limits; None: unchanged."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def profile_names() -> list[str]:
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def read_profile(name: str) -> Profile:
    """A bundled profile, or one from a file. Raises ConfigError."""
    file = _FOLDER / f"{name}.json" if name in profile_names() else Path(name)
    try:
        return _profile(file.stem, json.loads(file.read_text()))
    except OSError as error:
        known = ", ".join(profile_names())
        raise ConfigError(f"--profile {name}: is none of {known}, and no file that can be read") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--profile {name}: is not a profile: {error!r}") from error


def _profile(name: str, facts: dict[str, Any]) -> Profile:
    copy, disk, remote = (TransferTime(**facts[tier]) for tier in ("copy", "disk", "remote"))
    return Profile(name, facts["source"], _steps(facts), copy, disk, remote, **facts["limits"])


def _steps(facts: dict[str, Any]) -> StepTime:
    steps = facts["steps"]
    if "roofline" in steps:
        return RooflineSteps(adapter_bytes=facts["limits"]["adapter_bytes"], **steps["roofline"])
    return LearnedSteps([(StepLoad(*map(int, load)), float(seconds)) for *load, seconds in steps["recorded"]])
