"""An application that a configuration of Serve declares, as KubeRay does: gateways join it and change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.app import DEPLOYMENT
from lora_serve.engine_host.fleet.cluster import open_cluster

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
IMPORT_PATH = f"{__name__}:build"


def build(args: dict[str, Any]) -> Any:
    from ray import serve

    class Declared:
        pass

    return serve.deployment(Declared).options(name=DEPLOYMENT, num_replicas=args["replicas"]).bind()


@pytest.mark.nightly
def test_gateway_leaves_a_declared_application_as_it_is() -> None:
    settings = Settings(model="org/name", engine="ray", fleet_name="declared-fleet", cpus_per_replica=1)
    with open_cluster(settings.fleet_slice()):
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from lora_serve.engine_host.fleet.app import deploy

        serve.start(proxy_location="Disabled")
        declared = {"name": "declared-fleet", "route_prefix": None, "import_path": IMPORT_PATH, "args": {"replicas": 1}}
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[declared]), _blocking=True)
        deploy(settings)
        there = _get_global_client().get_serve_details()["applications"]["declared-fleet"]
        assert (there["source"], there["deployed_app_config"]["import_path"]) == ("declarative", IMPORT_PATH)
        deploy(replace(settings, fleet_name="own"))
        assert "own" in serve.status().applications
        serve.delete("own")
