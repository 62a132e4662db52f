"""The Serve application of a fleet: one deployment, whose replicas are engines; its start, and how it fares."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs
from pydantic import ValidationError
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.schema import APIType, ApplicationStatus

from lora_serve import __version__
from lora_serve.client.wire import body_of
from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.messages import Configure
from lora_serve.core.settings import SECRETS, Settings, describe
from lora_serve.core.vllm_flags import parsed_keys, taken
from lora_serve.engine_host.configure import configure_of
from lora_serve.engine_host.fleet import autoscaling
from lora_serve.engine_host.fleet.node import SELDOM_METRICS
from lora_serve.engine_host.fleet.replica import EngineReplica

UPSCALE_SECONDS, DOWNSCALE_SECONDS = 5.0, 300.0  # of need, or of none, before the number of replicas changes
DEPLOYMENT = "engine"  # its name in Ray Serve
_UNBOUNDED = 2**31 - 1  # requests of one replica as Serve counts them: the queues are the engine's own
_ROUTER = "lora_serve.client.ray.request_router:NamedReplicaRouter"
_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # a frame crosses one thread less
    **SELDOM_METRICS,
}


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a RayService, whose arguments are settings by name. Raises ConfigError."""
    settings = settings_of(args)
    return application(settings, settings.store if "store" in args else Path())


def application(settings: Settings, store: Path = Path()) -> serve.Application:
    """The application; equal settings give an equal version, which Serve leaves as it runs. `store`: a folder of the
    engines' machines for copies of adapters; none is given: among Ray's own files. Servers have stores of their own.
    """
    fleet, configure = settings.fleet_slice(), _configure_of(settings, store)
    more = (settings.warmup, settings.engine_step_timeout)
    version = _version_of(configure, *more)
    deployment = serve.deployment(EngineReplica).options(
        name=DEPLOYMENT,
        **_number_of(fleet),
        max_ongoing_requests=_UNBOUNDED,
        max_constructor_retry_count=2,  # before any has started; afterwards Serve tries for ever
        graceful_shutdown_timeout_s=settings.shutdown_timeout + 10,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        health_check_timeout_s=10,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        ray_actor_options={
            "num_cpus": fleet.num_cpus,
            "num_gpus": fleet.num_gpus,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        },
    )
    deployment._version = version  # noqa: SLF001  without one each deployment counts as another
    return deployment.bind(body_of([configure]), version, secrets.token_bytes(16), *more)


def _version_of(configure: Configure, *more: object) -> str:
    """A digest of all that makes an engine what it is."""
    anywhere = structs.replace(configure, adapters=replace(configure.adapters, store=Path()))
    return hashlib.sha256(body_of([anywhere]) + repr((__version__, more)).encode()).hexdigest()[:16]


def _number_of(fleet: FleetConfig) -> dict[str, Any]:
    if fleet.min_replicas == fleet.max_replicas:
        return {"num_replicas": fleet.max_replicas}
    policy = AutoscalingPolicy(policy_function=f"{autoscaling.__name__}:{autoscaling.replicas_wanted.__name__}")
    config = AutoscalingConfig(
        min_replicas=fleet.min_replicas,
        max_replicas=fleet.max_replicas,
        upscale_delay_s=UPSCALE_SECONDS,
        downscale_delay_s=DOWNSCALE_SECONDS,
        metrics_interval_s=1.0,
        look_back_period_s=5.0,
        policy=policy,
    )
    return {"num_replicas": "auto", "autoscaling_config": config}


def _configure_of(settings: Settings, store: Path) -> Configure:
    """Replicas have another working folder, and this server's log takes their lines in (`output.py`)."""
    configure = configure_of(settings)
    model = Path(configure.model.model)
    return structs.replace(
        configure,
        model=replace(configure.model, model=str(model.absolute()) if model.is_dir() else configure.model.model),
        adapters=replace(configure.adapters, store=store),
        log_format="json",
    )


def deploy(settings: Settings) -> None:
    """Starts the application, or updates it if it runs with other settings; does not wait for replicas. One that a
    configuration of Serve declares, as KubeRay does, stays as it is: gateways with older settings may join it.

    Called on a thread: Ray Serve waits. Raises ConfigError if the name belongs to an application that is no fleet.
    """
    fleet = settings.fleet_slice()
    start_serve()
    there = _get_global_client().get_serve_details()["applications"].get(fleet.name)
    if there is not None and not is_fleet(there["deployments"]):
        raise ConfigError(f"--fleet-name {fleet.name}: the cluster has another application of this name")
    if there is not None and there["source"] == APIType.DECLARATIVE:
        return
    target = serve.RunTarget(application(settings), name=fleet.name, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


def start_serve() -> None:
    """Starts Serve where it does not run yet. Of servers that do so at one moment all but one find it there."""
    try:
        serve.start(proxy_location=ProxyLocation.Disabled)
    except ActorAlreadyExistsError:
        serve.start(proxy_location=ProxyLocation.Disabled)


def is_fleet(deployments: Collection[str]) -> bool:
    """Whether an application with these deployments may be a fleet of this program. One that begins has none yet."""
    return set(deployments) <= {DEPLOYMENT}


def failure(name: str) -> str:
    """Words about why the application cannot be started; empty if it can."""
    status = serve.status().applications.get(name)
    if status is None or status.status is not ApplicationStatus.DEPLOY_FAILED:
        return ""
    return " ".join(status.message.split())[:1000]


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Settings as `--config`'s file would have them, `engine` being ray. Neither the environment nor a folder is looked
    at: the machine that builds the application need not have the model. Raises ConfigError, a line per wrong setting.
    """
    if shown := [name for name in SECRETS if name in arguments]:
        variables = ", ".join(f"LORA_SERVE_{name.upper()}" for name in shown)
        raise ConfigError(f"{', '.join(shown)}: Ray shows an application's arguments; set {variables} in its pods")
    given = {"engine": "ray"} | taken(parsed_keys(arguments))[0]
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigError(describe(error, dict.fromkeys(given, "in the application's arguments"))) from None
    if settings.engine != "ray":
        raise ConfigError(f"--engine: a fleet's is ray (got {settings.engine!r} in the application's arguments)")
    return settings
