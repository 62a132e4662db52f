"""The Serve application of a fleet: one deployment, whose replicas are actors with a whole engine each; its start, and
its failures.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import secrets
import ssl
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from msgspec import structs
from pydantic import ValidationError
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.schema import APIType, ApplicationStatus

from lora_serve import __version__
from lora_serve.client.process import configure_of
from lora_serve.client.wire import body_of, tls, to_engine
from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError, on_one_line
from lora_serve.core.messages import Configure
from lora_serve.core.settings import SECRETS, Settings, defaults_on_device, describe
from lora_serve.core.vllm_flags import parsed_keys, taken
from lora_serve.engine_host.fleet import ray_hooks
from lora_serve.engine_host.fleet.gateways import Entrance
from lora_serve.engine_host.fleet.node import SELDOM_METRICS
from lora_serve.engine_host.fleet.replica_engine import ReplicaEngine, load_engine

_log = logging.getLogger(__name__)
_MODULE, _OPENS = "ray.serve._private.replica", "add_port_to_grpc_server"
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
    policy = AutoscalingPolicy(policy_function=f"{ray_hooks.__name__}:{ray_hooks.replicas_wanted.__name__}")
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
        model=replace(configure.model, model=str(model.absolute()) if model.exists() else configure.model.model),
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
    return on_one_line(status.message, 1000)


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Settings as `--config`'s file would have them, `engine` being ray. Neither the environment nor a folder is looked
    at: the machine that builds the application need not have the model. Raises ConfigError, a line per wrong setting.
    """
    if shown := [name for name in SECRETS if name in arguments]:
        variables = ", ".join(f"LORA_SERVE_{name.upper()}" for name in shown)
        raise ConfigError(f"{', '.join(shown)}: Ray shows an application's arguments; set {variables} in its pods")
    given = {"engine": "ray"} | taken(parsed_keys(arguments))[0]
    try:
        settings = Settings(**defaults_on_device(given) | given)
    except ValidationError as error:
        raise ConfigError(describe(error, dict.fromkeys(given, "in the application's arguments"))) from None
    if settings.engine != "ray":
        raise ConfigError(f"--engine: a fleet's is ray (got {settings.engine!r} in the application's arguments)")
    return settings


class EngineReplica:
    """Ray Serve makes it, and hands it the calls of the gateways. Once it is made it is warm."""

    _engine: ReplicaEngine

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, configure: bytes, settings: str, roots_key: bytes, warmup: str, step_timeout: float
    ) -> None:
        """`configure`: a frame with a Configure; `settings`: its digest. `step_timeout`: seconds without progress after
        which the engine counts as hung; 0: any number. Raises ModelError, ConfigError.
        """
        from lora_serve.model.system.threads import use_one_core  # torch, which only an actor needs

        listen_as_the_node()
        (message,) = to_engine(configure)
        assert isinstance(message, Configure)
        self._step_timeout = step_timeout
        name = serve.get_replica_context().replica_id.unique_id
        engine, blobs = await asyncio.to_thread(load_engine, message, name, _ray_folder())
        sys.setswitchinterval(0.0005)  # see launch.py
        node = ray.util.get_node_ip_address()
        self._engine = ReplicaEngine(engine, name, settings, roots_key, node, blobs, use_one_core)
        self._entrance = Entrance(node, self._engine.gateways, self._engine.greeting)
        await self._entrance.open(tls(ssl.Purpose.CLIENT_AUTH))
        await self._engine.warm_up(warmup, message.engine)
        _log.info("replica %s is warm", name)

    async def place(self, *, replica: str) -> bytes:
        """See `Entrance.place`. `replica` was for the request router."""
        return msgspec.msgpack.encode(self._entrance.place)

    async def __del__(self) -> None:
        """Ray Serve, which asks no more gateways to come, awaits it before the process ends: they leave when their
        requests have ended.
        """
        await self._entrance.emptied()

    async def check_health(self) -> None:
        """Ray Serve asks every few seconds, and replaces a replica that fails. Raises RuntimeError."""
        if self._step_timeout and self._engine.seconds_without_progress > self._step_timeout:
            raise RuntimeError(f"the engine made no progress for {self._step_timeout:g} s")
        if not self._engine.is_reporting:
            raise RuntimeError("the replica's reports to the servers have ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures that `ray_hooks.replicas_wanted` decides by."""
        return self._engine.load


def _ray_folder() -> Path:
    """The folder of Ray's files on this machine, of this cluster's session."""
    return Path(importlib.import_module("ray._private.worker")._global_node.get_session_dir_path())  # noqa: SLF001


def listen_as_the_node() -> None:
    """Called in a replica while Ray Serve makes it: its port for calls over gRPC opens on the address of its Ray node
    alone, which is loopback in a cluster of a server's own, and not on all of the machine's. What arrives there is
    unpickled; it asks for the cluster's token, if there is one. Raises RuntimeError if this Ray opens it otherwise.
    """
    module = importlib.import_module(_MODULE)
    opens: Callable[[object, str], int] | None = getattr(module, _OPENS, None)
    if opens is None:
        raise RuntimeError(f"Ray has no {_MODULE}.{_OPENS}: another release opens the replicas' port in another way")
    host = str(ray.util.get_node_ip_address())
    address = f"[{host}]:0" if ":" in host else f"{host}:0"

    def open_there(server: object, everywhere: str) -> int:
        return opens(server, address)

    setattr(module, _OPENS, open_there)
