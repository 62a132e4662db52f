"""The Serve application of a fleet: one deployment, whose replicas are engines."""

from __future__ import annotations

import hashlib
import secrets

from ray import serve
from ray.serve.config import RequestRouterConfig

from lora_serve import __version__
from lora_serve.client.wire import body_of
from lora_serve.core.config import FleetConfig
from lora_serve.core.messages import Configure
from lora_serve.engine_host.fleet.replica import EngineReplica

_UNBOUNDED = 2**31 - 1  # requests of one replica as Serve counts them: the queues are the engine's own
_ROUTER = "lora_serve.client.ray.request_router:NamedReplicaRouter"
_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}  # a frame crosses one thread less


def application(configure: Configure, fleet: FleetConfig, warmup: str, drain: float) -> serve.Application:
    """The application; equal settings give an equal version, which Serve leaves as it runs. `drain`: seconds that a
    replica's requests may take once it gets no more.
    """
    frame = body_of([configure])
    settings = hashlib.sha256(frame + f"{__version__} {warmup}".encode()).hexdigest()[:16]
    deployment = serve.deployment(EngineReplica).options(
        name="engine",
        num_replicas=fleet.replicas or 1,
        max_ongoing_requests=_UNBOUNDED,
        graceful_shutdown_timeout_s=drain + 10,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        health_check_timeout_s=30,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        ray_actor_options={
            "num_cpus": fleet.num_cpus,
            "num_gpus": fleet.num_gpus,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        },
    )
    deployment._version = settings
    return deployment.bind(frame, settings, secrets.token_bytes(16), warmup)
