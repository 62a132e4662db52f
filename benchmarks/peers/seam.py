"""What every engine of a side by side is: it can be installed, started on a checkpoint, given jobs, stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.workload import Job, Load, Measured

BASE = "bench-base"
POPULARITIES = ("base", "identical", "uniform", "skewed")
MAX_MODEL_LEN = 512  # tokens of one request that every engine must have room for


class PeerError(Exception):
    """An engine that cannot be installed or started; the message says what is missing, in the words of its tools."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What is served: the base model's folder and the adapters', in the order of their popularity."""

    model: Path
    adapters: Mapping[str, Path]
    scratch: Path  # a folder for logs and conversions; gone after the run


class Running(Protocol):
    """A started engine, ready for jobs and idle between two `run` calls."""

    start_seconds: float  # from the start of its process to its readiness

    @property
    def pid(self) -> int:
        """The root of its processes."""

    def run(self, jobs: Sequence[Job], load: Load) -> Measured:
        """All jobs, at most `load.concurrency` at a time. What fails is counted. Raises PeerError if it is gone."""

    def stop(self) -> None:
        """End its processes; may be called twice."""


class Peer(Protocol):
    """One engine in one configuration. Of a family's members the fastest counts."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...

    @property
    def popularities(self) -> Sequence[str]:
        """Those it can serve; all of them, but for engines without LoRA."""
        return POPULARITIES

    def install(self) -> None:
        """Make what it needs, once; done before, it returns at once. Raises PeerError."""

    def versions(self) -> Mapping[str, str]:
        """Of what it runs on. Raises PeerError if it is not installed."""

    def start(self, checkpoints: Checkpoints, load: Load, num_threads: int) -> Running:
        """Return when it answers. Raises PeerError, and leaves nothing running then."""
