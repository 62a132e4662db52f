"""The fleet: replicas of the engine on Ray (--engine ray)."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from lora_serve.core.extensions import RouterName
from lora_serve.core.setting_types import YEAR, Replicas, SettingsGroup

MAX_REPLICAS = 1000
_ADDRESS = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


class FleetSettings(SettingsGroup):
    """The fleet: replicas of the engine on Ray, for `--engine ray` alone."""

    replicas: Replicas = Field(
        1,
        description="engines, each with the whole model; MIN..MAX, such as 2..8: as many of them as the load needs; "
        "auto: from 1 to --max-replicas",
    )
    max_replicas: int | None = Field(
        None, ge=1, le=MAX_REPLICAS, description="engines at most, with --replicas auto, which needs it"
    )
    cpus_per_replica: float | None = Field(
        None, gt=0, le=4096, description="cores of each engine; default: this machine's, shared out among the replicas"
    )
    num_gpus: float | None = Field(
        None, ge=0, le=64, description="GPUs of each engine; default: 1 with --device cuda, else 0"
    )
    ray_address: str = Field(
        "none",
        description="HOST:PORT of the Ray cluster to join, auto: one that runs on this machine, or none: start one of "
        "this server's own, for this machine alone",
    )
    fleet_name: str = Field(
        "lora-serve",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
        description="name of the engines' application in the Ray cluster; servers of one name share them",
    )
    router: RouterName = Field(
        "affinity", description="choice of a request's engine; two_choices is what Ray Serve does by itself"
    )
    fleet_wait: float = Field(
        60.0, ge=0, le=YEAR, description="seconds that a request waits while no engine is there; then 503"
    )

    @field_validator("ray_address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        if value in ("none", "auto"):
            return value
        if value.startswith("ray://"):
            raise ValueError("Ray's client protocol is not spoken here: give the HOST:PORT of the cluster's GCS")
        match = _ADDRESS.fullmatch(value)
        if not match or not 0 < int(match[1]) < 2**16:
            raise ValueError("expected none, auto or HOST:PORT, such as 10.0.0.5:6379")
        return value

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.replicas == "auto" and self.max_replicas is None:
            raise ValueError(
                "--replicas auto: needs --max-replicas, the most engines that fit: each holds the whole model"
            )
        if self.replicas != "auto" and self.max_replicas is not None:
            raise ValueError(
                f"--max-replicas {self.max_replicas}: bounds --replicas auto, not --replicas {self.replicas}"
            )
        return self

    @property
    def replica_range(self) -> tuple[int, int]:
        """The fewest and the most engines; the same where the load does not decide."""
        if self.replicas == "auto":
            return 1, self.max_replicas or 1
        least, _, most = str(self.replicas).partition("..")
        return int(least), int(most or least)


def needless(settings: FleetSettings) -> list[str]:
    """The flags that were given another value than their default."""
    changed = {name for name, field in FleetSettings.model_fields.items() if getattr(settings, name) != field.default}
    return [f"--{name.replace('_', '-')}" for name in FleetSettings.model_fields if name in changed]
