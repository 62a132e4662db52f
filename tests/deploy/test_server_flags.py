"""The server understands what the chart tells it: flags, settings, variables, paths, the uid, the drain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import lora_serve
from lora_serve.app.shutdown import ENDING_SECONDS, EXIT_SECONDS
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.core.settings import Settings
from tests.deploy.pod_settings import SECRETS, settings_of_pod
from tests.deploy.rendering import CHART, DEPLOY, NAMES, ROOT, Rendered
from tests.deploy.setting_schema import setting_schemas

# What the chart sets itself; the rest may stand in `settings`.
OWN = {
    "admin_key", "api_key", "overflow_api_key", "redis_url", "config", "model", "served_model_name", "host", "port",
    "store", "engine", "shutdown_timeout", "ssl_certfile", "ssl_keyfile", "replicas", "max_replicas",
    "cpus_per_replica", "num_gpus", "ray_address", "fleet_name",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_server_understands_its_flags_and_variables(
    renderings: dict[str, Rendered], name: str, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_of_pod(renderings[name], environment, tmp_path)
    container = renderings[name].server()
    assert (settings.host, settings.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert (settings.redis_url is None) == (name == "alone")
    assert settings.admin_key == SECRETS["LORA_SERVE_ADMIN_KEY"]
    known = {f"LORA_SERVE_{field.upper()}" for field in Settings.model_fields}
    assert {variable for variable in renderings[name].environment() if variable.startswith("LORA_")} <= known


def test_values_of_settings_arrive_as_they_were_given(
    renderings: dict[str, Rendered], environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = settings_of_pod(renderings["settings"], environment, tmp_path)
    assert found.max_upload_size == 4_000_000_000
    assert (found.max_loras, found.auth, found.warmup) == (32, "on", "off")
    assert (found.speculate, found.enable_prefix_caching, found.fuse_layers) == ("off", False, True)
    assert found.tenant_weight == (("acme", 2.0), ("lumen", 1.0))
    assert found.adapter_tenant_floor == 0.25
    assert found.adapter_host_memory == 4 * 2**30
    overflow = found.part(OverflowConfig)
    assert (overflow.neighbours, overflow.overflow_api_key) == (
        (("gpu", "http://10.0.0.7:8000"),),
        "a-key-of-the-neighbour",
    )
    assert overflow.overflow_model_map == (("acme/*", "*"), ("base", "big"))


def test_more_flags_win_over_settings_and_tls_is_on(
    renderings: dict[str, Rendered], environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = settings_of_pod(renderings["tls"], environment, tmp_path)
    assert found.max_loras == 7
    assert (found.ssl_certfile, found.ssl_keyfile) == (tmp_path / "tls.crt", tmp_path / "tls.key")
    container = renderings["tls"].server()
    assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")} == {
        "HTTPS"
    }


def test_schema_names_every_setting_of_the_server() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    named = set(schema["properties"]["settings"]["propertyNames"]["enum"])
    wanted = set(Settings.model_fields) - OWN
    assert (wanted - named, named - wanted) == (set(), set()), "values.schema.json lacks the first and has the second"
    assert set(Settings.model_fields) >= OWN
    told = setting_schemas(sorted(wanted))
    assert schema["properties"]["settings"]["properties"] == told, "run python -m tests.deploy.setting_schema"
    assert {"router", "max_loras"} <= told.keys()


def test_probes_ask_routes_that_the_server_has(renderings: dict[str, Rendered]) -> None:
    openapi = (ROOT / "docs" / "reference" / "http.md").read_text()
    container = renderings["plain"].server()
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    for path in {*paths.values(), renderings["cpu"].of("ServiceMonitor")["spec"]["endpoints"][0]["path"]}:
        assert f"GET {path}" in openapi


def test_pod_lives_until_the_server_has_drained_and_ended(renderings: dict[str, Rendered]) -> None:
    """preStop, --shutdown-timeout, and what shutdown.py takes at most after that."""
    for rendering in renderings.values():
        container, pod = rendering.server(), rendering.pod()
        drain = float(container["args"][container["args"].index("--shutdown-timeout") + 1])
        sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= sleep + drain + ENDING_SECONDS + EXIT_SECONDS
        readiness = container["readinessProbe"]
        assert sleep >= readiness["periodSeconds"] * readiness["failureThreshold"]


def test_start_may_take_many_times_what_was_measured(renderings: dict[str, Rendered]) -> None:
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text()
    measured = [
        float(found)
        for found in re.findall(r"^\| (?:a new store|the store of a server).*\| ([\d.]+) s \|$", page, re.M)
    ]
    probe = renderings["plain"].server()["startupProbe"]
    assert len(measured) >= 2
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 40 * max(measured)


def test_user_is_the_images(renderings: dict[str, Rendered]) -> None:
    for dockerfile in ("Dockerfile", "Dockerfile.cuda"):
        (uid,) = re.findall(r"--uid (\d+)", (ROOT / "docker" / dockerfile).read_text())
        assert renderings["plain"].pod()["securityContext"]["runAsUser"] == int(uid)


def test_writable_folders_are_mounted(renderings: dict[str, Rendered]) -> None:
    """Everything else of the root is read-only."""
    for rendering in renderings.values():
        mounts = {item["mountPath"]: item for item in rendering.server()["volumeMounts"]}
        assert {"/data", "/tmp", "/cache"} <= set(mounts)
        volumes = {item["name"] for item in rendering.pod()["volumes"]} | {"store"}
        assert {item["name"] for item in mounts.values()} <= volumes
        found = rendering.environment()
        for variable in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME"):
            assert found[variable].startswith(("/cache", "/data"))


def test_versions_are_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == lora_serve.__version__


def test_compose_and_chart_run_redis_alike(renderings: dict[str, Rendered]) -> None:
    compose: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]["redis"]
    pod = renderings["trial"].of("StatefulSet", "-redis")["spec"]["template"]["spec"]
    (redis,) = pod["containers"]
    assert redis["image"] == compose["image"]
    assert redis["args"][:4] == compose["command"][1:]
    context = pod["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == compose["user"]


def test_commands_of_the_notes_are_the_programs(renderings: dict[str, Rendered]) -> None:
    from lora_serve.cli import main

    text = renderings["trial"].notes + (DEPLOY.parent / "docs" / "deploy.md").read_text()
    for words in sorted(set(re.findall(r"lora-serve ((?:tenants|keys|adapters|registry) [a-z]+)", text))):
        with pytest.raises(SystemExit) as ended:
            main([*words.split(), "--help"])
        assert ended.value.code == 0, words
