"""A machine with a model on it, as a JSON file of `profiles/` or the caller's: limits, costs, and their source.

`steps` is {"roofline": {...}}, a model of hardware, or {"recorded": [[tokens, rows, adapters, KV tokens read, seconds],
...]}, steps of a real server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_serve.core.batch import StepLoad
from lora_serve.core.errors import ConfigError
from lora_serve.simulate.costs import LearnedSteps, RooflineSteps, StepTime, TransferTime

_FOLDER = Path(__file__).with_name("profiles")


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

    def changed(self, **changes: Any) -> Profile:
        """The profile with other limits; None: unchanged."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def profile_names() -> list[str]:
    """The names of the bundled profiles."""
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
