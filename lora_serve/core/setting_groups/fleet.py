"""The fleet: replicas of the engine on Ray (--engine ray)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import AfterValidator

from lora_serve.core.extensions import RouterName
from lora_serve.core.setting_types import YEAR, Replicas, setting

MAX_REPLICAS = 1000
_ADDRESS = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


def _check_address(value: str) -> str:
    if value in ("none", "auto"):
        return value
    if value.startswith("ray://"):
        raise ValueError("Ray's client protocol is not spoken here: give the HOST:PORT of the cluster's GCS")
    match = _ADDRESS.fullmatch(value)
    if not match or not 0 < int(match[1]) < 2**16:
        raise ValueError("expected none, auto or HOST:PORT, such as 10.0.0.5:6379")
    return value


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The fleet: replicas of the engine on Ray, for `--engine ray` alone."""

    replicas: Replicas = setting(
        1,
        "engines, each with the whole model; MIN..MAX, such as 2..8: as many of them as the load needs; "
        "auto: from 1 to --max-replicas",
    )
    max_replicas: int | None = setting(
        None, "engines at most, with --replicas auto, which needs it", ge=1, le=MAX_REPLICAS
    )
    cpus_per_replica: float | None = setting(
        None, "cores of each engine; default: this machine's, shared out among the replicas", gt=0, le=4096
    )
    num_gpus: float | None = setting(None, "GPUs of each engine; default: 1 with --device cuda, else 0", ge=0, le=64)
    ray_address: Annotated[str, AfterValidator(_check_address)] = setting(
        "none",
        "HOST:PORT of the Ray cluster to join, auto: one that runs on this machine, or none: start one of "
        "this server's own, for this machine alone",
    )
    fleet_name: str = setting(
        "lora-serve",
        "name of the engines' application in the Ray cluster; servers of one name share them",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
    )
    router: RouterName = setting(
        "affinity", "choice of a request's engine; two_choices is what Ray Serve does by itself"
    )
    fleet_wait: float = setting(60.0, "seconds that a request waits while no engine is there; then 503", ge=0, le=YEAR)

    def check_replicas(self) -> None:
        """Raises ValueError."""
        if self.replicas == "auto" and self.max_replicas is None:
            raise ValueError(
                "--replicas auto: needs --max-replicas, the most engines that fit: each holds the whole model"
            )
        if self.replicas != "auto" and self.max_replicas is not None:
            raise ValueError(
                f"--max-replicas {self.max_replicas}: bounds --replicas auto, not --replicas {self.replicas}"
            )

    @property
    def replica_range(self) -> tuple[int, int]:
        """The fewest and the most engines; the same where the load does not decide."""
        if self.replicas == "auto":
            return 1, self.max_replicas or 1
        least, _, most = str(self.replicas).partition("..")
        return int(least), int(most or least)


def needless(settings: FleetSettings) -> list[str]:
    """The flags that were given another value than their default."""
    changed = [field.name for field in fields(FleetSettings) if getattr(settings, field.name) != field.default]
    return [f"--{name.replace('_', '-')}" for name in changed]
