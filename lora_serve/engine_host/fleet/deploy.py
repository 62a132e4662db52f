"""Starts the fleet's application, and looks how it fares. Called on threads: Ray Serve waits."""

from __future__ import annotations

from collections.abc import Collection

from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.schema import APIType, ApplicationStatus

from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.app import DEPLOYMENT, application


def deploy(settings: Settings) -> None:
    """Starts the application, or updates it if it runs with other settings; does not wait for replicas. One that a
    configuration of Serve declares, as KubeRay does, stays as it is: gateways with older settings may join it.

    Raises ConfigError if the name belongs to an application that is no fleet.
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
