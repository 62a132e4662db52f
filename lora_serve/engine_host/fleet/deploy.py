"""Starts the fleet's application, and looks how it fares. Called on threads: Ray Serve waits."""

from __future__ import annotations

from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.schema import APIType, ApplicationStatus

from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.app import application


def deploy(settings: Settings) -> None:
    """Starts the application, or updates it if it runs with other settings; does not wait for replicas. One that a
    configuration of Serve declares, as KubeRay does, stays as it is: gateways with older settings may join it.
    """
    fleet = settings.fleet_slice()
    start_serve()
    if _is_declared(fleet.name):
        return
    target = serve.RunTarget(application(settings), name=fleet.name, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


def start_serve() -> None:
    """Starts Serve where it does not run yet. Of servers that do so at one moment all but one find it there."""
    try:
        serve.start(proxy_location=ProxyLocation.Disabled)
    except ActorAlreadyExistsError:
        serve.start(proxy_location=ProxyLocation.Disabled)


def _is_declared(name: str) -> bool:
    applications = _get_global_client().get_serve_details()["applications"]
    return name in applications and applications[name]["source"] == APIType.DECLARATIVE


def failure(name: str) -> str:
    """Words about why the application cannot be started; empty if it can."""
    status = serve.status().applications.get(name)
    if status is None or status.status is not ApplicationStatus.DEPLOY_FAILED:
        return ""
    return " ".join(status.message.split())[:1000]
