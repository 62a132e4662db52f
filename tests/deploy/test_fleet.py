"""A RayService that Ray itself understands, whose engines fit their pods and are set up as their gateways are."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_serve.client.process import configure_of
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.app import settings_of
from tests.deploy.pod_settings import settings_of_pod
from tests.deploy.rendering import Rendered

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
FLEETS = ("ray", "fleet")


def cluster(rendering: Rendered) -> dict[str, Any]:
    found: dict[str, Any] = rendering.of("RayService")["spec"]["rayClusterConfig"]
    return found


def engines(rendering: Rendered) -> dict[str, Any]:
    (group,) = cluster(rendering)["workerGroupSpecs"]
    return dict(group)


def application(rendering: Rendered) -> dict[str, Any]:
    (found,) = yaml.safe_load(rendering.of("RayService")["spec"]["serveConfigV2"])["applications"]
    return dict(found)


@pytest.mark.parametrize("name", FLEETS)
def test_serve_takes_the_application(renderings: dict[str, Rendered], name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    read = ServeDeploySchema.model_validate(yaml.safe_load(renderings[name].of("RayService")["spec"]["serveConfigV2"]))
    assert read.proxy_location == "Disabled"
    assert read.applications[0].route_prefix is None
    assert read.applications[0].import_path == "lora_serve.engine_host.fleet.app:build"


@pytest.mark.parametrize("name", FLEETS)
def test_engines_are_set_up_as_their_gateways_are(
    renderings: dict[str, Rendered], name: str, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("LORA_SERVE_LOG_FORMAT", "text")  # an image may say so
    gateway = settings_of_pod(renderings[name], environment, tmp_path)
    arguments = application(renderings[name])["args"]
    engine = settings_of(arguments | {"model": gateway.model})
    assert configure_of(engine) == configure_of(gateway)
    assert engine.fleet_slice() == replace(gateway.fleet_slice(), address=None)
    assert gateway.redis_url is not None
    assert engine.fleet_name == gateway.fleet_name == application(renderings[name])["name"]
    assert (gateway.engine, gateway.ray_address) == ("ray", "lora-serve-head-svc:6379")
    (container,) = engines(renderings[name])["template"]["spec"]["containers"]
    folders = {item["mountPath"] for item in container["volumeMounts"]}
    assert {arguments["model"], "/data", "/tmp", "/cache", "/dev/shm"} <= folders
    assert arguments["store"].startswith("/data/")


def test_engines_are_as_many_as_was_said(renderings: dict[str, Rendered]) -> None:
    grows, fixed = (settings_of(application(renderings[name])["args"]).fleet_slice() for name in FLEETS)
    assert (grows.min_replicas, grows.max_replicas) == (2, 8)
    assert (fixed.min_replicas, fixed.max_replicas) == (3, 3)
    assert [renderings[name].of("StatefulSet")["spec"]["replicas"] for name in FLEETS] == [3, 2]


@pytest.mark.parametrize(("name", "cores", "gpus"), [("ray", 8, 1), ("fleet", 2, 0)])
def test_one_engine_fits_a_pod(renderings: dict[str, Rendered], name: str, cores: int, gpus: int) -> None:
    """By what Ray's autoscaler makes of the cluster: it adds a pod for each engine that finds no room."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as read

    found = read({"metadata": {"name": "x", "namespace": "ai"}, "spec": cluster(renderings[name])})
    types = found["available_node_types"]
    (group,) = (kind for label, kind in types.items() if label != found["head_node_type"])
    assert types[found["head_node_type"]]["resources"]["CPU"] == 0
    assert (group["resources"]["CPU"], group["resources"].get("GPU", 0)) == (cores, gpus)
    assert group["min_workers"] == 1
    fleet = settings_of(application(renderings[name])["args"]).fleet_slice()
    assert (fleet.num_cpus, fleet.num_gpus) == (cores, gpus)
    assert group["max_workers"] >= fleet.max_replicas


@pytest.mark.parametrize("name", FLEETS)
def test_ray_start_knows_its_options(renderings: dict[str, Rendered], name: str) -> None:
    from ray.scripts.scripts import start

    for group in (cluster(renderings[name])["headGroupSpec"], engines(renderings[name])):
        start.make_context("start", [f"--{key}={value}" for key, value in group["rayStartParams"].items()])


@pytest.mark.parametrize("name", FLEETS)
def test_gateway_may_join_the_cluster(renderings: dict[str, Rendered], name: str) -> None:
    variables, server = renderings[name].environment(), renderings[name].server()
    token = variables["LORA_SERVE_ADMIN_KEY"]["secretKeyRef"] | {"key": "auth_token"}
    assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN"]) == ("token", {"secretKeyRef": token})
    assert cluster(renderings[name])["authOptions"] == {"mode": "token", "secretName": token["name"]}
    folders = {item["mountPath"]: item["name"] for item in server["volumeMounts"]}
    (shared,) = (item for item in renderings[name].pod()["volumes"] if item["name"] == folders["/dev/shm"])
    assert shared["emptyDir"]["medium"] == "Memory"


def test_probes_ask_what_ray_answers_without_a_token(renderings: dict[str, Rendered]) -> None:
    from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS

    for group in (cluster(renderings["fleet"])["headGroupSpec"], engines(renderings["fleet"])):
        container = group["template"]["spec"]["containers"][0]
        for kind in ("startup", "liveness", "readiness"):
            assert container[f"{kind}Probe"]["httpGet"]["path"] in PUBLIC_EXACT_PATHS


def test_versions_of_ray_are_the_images(renderings: dict[str, Rendered]) -> None:
    assert cluster(renderings["fleet"])["rayVersion"] == importlib.metadata.version("ray")


def test_pods_of_ray_end_after_what_runs_on_them(renderings: dict[str, Rendered]) -> None:
    for name in FLEETS:
        pod = engines(renderings[name])["template"]["spec"]
        gateway = renderings[name].server()
        drain = int(gateway["args"][gateway["args"].index("--shutdown-timeout") + 1])
        sleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert sleep >= drain + gateway["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] > sleep
        assert renderings[name].of("StatefulSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_nothing_secret_is_among_what_ray_shows(renderings: dict[str, Rendered]) -> None:
    for name in FLEETS:
        assert not re.search("redis|key|token|password", renderings[name].of("RayService")["spec"]["serveConfigV2"])
        names = [item["name"] for item in engines(renderings[name])["template"]["spec"]["containers"][0]["env"]]
        own = {f"LORA_SERVE_{field.upper()}" for field in Settings.model_fields}
        assert set(names) & own == {"LORA_SERVE_REDIS_URL"}


def test_application_is_built_of_its_arguments(renderings: dict[str, Rendered]) -> None:
    """By Serve's own rules for a function that an import path names; as a gateway would start it."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built

    from lora_serve.engine_host.fleet import app

    given = application(renderings["fleet"])
    module, _, name = given["import_path"].partition(":")
    deployment = built(getattr(importlib.import_module(module), name), given["args"])._bound_deployment
    assert deployment.num_replicas == 3
    assert (deployment.ray_actor_options["num_cpus"], deployment.ray_actor_options["num_gpus"]) == (2, 0)
    same = app.application(settings_of(given["args"]))
    assert deployment.version == same._bound_deployment.version


def test_nodes_of_ray_talk_to_each_other_and_to_nobody_else(renderings: dict[str, Rendered]) -> None:
    rendering = renderings["fleet"]
    labels = [template["metadata"]["labels"] for template in rendering.templates()]
    assert sorted(item["app.kubernetes.io/component"] for item in labels) == ["engine", "head", "redis", "server"]
    policy = rendering.of("NetworkPolicy", "-ray")["spec"]
    components = {"key": "app.kubernetes.io/component", "operator": "In"}
    assert policy["podSelector"]["matchExpressions"] == [components | {"values": ["head", "engine"]}]
    nodes, operator = policy["ingress"]
    (peer,) = nodes["from"]
    assert peer["podSelector"]["matchExpressions"] == [components | {"values": ["server", "head", "engine"]}]
    assert "namespaceSelector" not in peer
    assert operator["ports"] == [{"port": 8265}]
    assert rendering.of("NetworkPolicy")["spec"]["ingress"][1] == nodes
    engines_of_redis = rendering.of("NetworkPolicy", "-redis")["spec"]["ingress"][0]["from"][1]["podSelector"]
    assert engines_of_redis["matchExpressions"] == [components | {"values": ["head", "engine"]}]
    assert rendering.of("PodDisruptionBudget", "-engines")["spec"]["selector"]["matchLabels"].items() <= next(
        item.items() for item in labels if item["app.kubernetes.io/component"] == "engine"
    )


def test_head_has_the_ports_by_the_names_that_kuberay_looks_for(renderings: dict[str, Rendered]) -> None:
    (container,) = cluster(renderings["fleet"])["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "serve": 8000}


def test_head_keeps_its_state_in_redis(renderings: dict[str, Rendered]) -> None:
    found = {name: cluster(renderings[name])["gcsFaultToleranceOptions"] for name in FLEETS}
    assert found["fleet"]["redisAddress"] == "lora-serve-redis:6379"
    assert found["ray"]["redisAddress"] == "redis.example.org:6379"
    assert found["ray"]["redisPassword"]["valueFrom"]["secretKeyRef"]["optional"] is True


def test_notes_tell_of_the_token(renderings: dict[str, Rendered]) -> None:
    for name in FLEETS:
        assert "--from-literal=auth_token=" in renderings[name].notes
    assert "3 gateways, 2 to 8 engines" in renderings["ray"].notes
    assert "2 gateways, 3 engines" in renderings["fleet"].notes
    assert "auth_token" not in renderings["trial"].notes
