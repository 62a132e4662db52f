"""Operation: usage, metrics, traces, start, stop and log; the fleet: replicas of the engine on Ray (--engine ray)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from lora_serve.core.setting_texts import is_web_url
from lora_serve.core.setting_types import YEAR, Replicas, RouterName, setting

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


def _check_endpoint(value: str | None) -> str | None:
    if value is not None and not is_web_url(value):
        raise ValueError("expected a URL such as http://localhost:4318/v1/traces")
    return value


@dataclass(frozen=True, kw_only=True)
class AccountingConfig:
    """The counting of tenants' limits and usage."""

    quota_without_redis: Literal["local", "refuse"] = setting(
        "local", "limits per minute while --redis-url is away: local: each server counts alone; refuse: 429"
    )
    usage_flush_seconds: float = setting(
        1.0, "seconds between two writes of usage: what a crash may take", ge=0.01, le=60
    )
    usage_bucket_seconds: int = setting(
        3600, "seconds that one row of usage covers: how fine `from` and `to` can be", ge=60, le=86_400
    )
    usage_keep_days: int = setting(400, "days that usage is kept", ge=1, le=10_000)


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Names in /metrics."""

    metrics_tenants: int = setting(
        200, "tenants with series of their own in /metrics; the rest are added up as other", ge=0, le=10_000
    )
    metrics_names: Literal["auto", "open", "admin"] = setting(
        "auto", "who reads tenants' and adapters' names in /metrics; auto: all while --auth is off, else the admin"
    )


@dataclass(frozen=True, kw_only=True)
class ObservabilitySettings(MetricsSettings):
    """Metrics and traces of the requests."""

    otlp_traces_endpoint: Annotated[str | None, AfterValidator(_check_endpoint)] = setting(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP) for a trace per request; default: none"
    )


@dataclass(frozen=True, kw_only=True)
class ShutdownSettings:
    """The end of the server."""

    shutdown_timeout: float = setting(
        30.0, "seconds that running requests may take to end after SIGTERM; then exit code 4", ge=0, le=YEAR
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Requests that bring no seed."""

    seed: int = setting(0, "seed of unseeded requests' sampling", ge=-(2**63), le=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class OperationSettings(SamplingSettings, ShutdownSettings):
    """Start, stop and log."""

    log_format: Literal["console", "json"] = setting("console", "form of the log on standard error")
    config: Path | None = setting(None, "YAML file with any of these settings")


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
