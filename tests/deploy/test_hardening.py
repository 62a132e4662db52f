"""Pods may do no more than they need, find Redis alone, leave one at a time, and write no secret into a manifest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy.rendering import NAMES, Rendered


@pytest.mark.parametrize("name", NAMES)
def test_pods_may_do_no_more_than_they_need(renderings: dict[str, Rendered], name: str) -> None:
    pods = list(renderings[name].pods())
    assert len(pods) == {"trial": 2, "ray": 3, "fleet": 4}.get(name, 1)
    for pod in pods:
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        autoscales = pod["containers"][0]["name"] == "ray-head"  # beside it KubeRay runs what asks Kubernetes for pods
        assert pod["automountServiceAccountToken"] is autoscales
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", NAMES)
def test_no_service_of_the_namespace_sets_a_setting(renderings: dict[str, Rendered], name: str) -> None:
    """The Service `lora-serve` would set LORA_SERVE_PORT=tcp://10.0.0.1:8000 in every pod of the namespace."""
    assert renderings[name].pod()["enableServiceLinks"] is False


@pytest.mark.parametrize("name", NAMES)
def test_secrets_are_only_named(renderings: dict[str, Rendered], name: str) -> None:
    rendering = renderings[name]
    assert "Secret" not in rendering.kinds()
    for variable, value in rendering.environment().items():
        if variable.endswith(("_KEY", "_PASSWORD", "_TOKEN")):
            assert "secretKeyRef" in value, variable
    url = rendering.environment().get("LORA_SERVE_REDIS_URL")
    bundled = "redis://:$(REDIS_PASSWORD)@lora-serve-redis:6379/0"
    expected = {"trial": bundled, "fleet": bundled, "alone": None}
    if name in expected:
        assert url == expected[name]
    else:
        assert url == {"secretKeyRef": {"name": rendering.environment()["LORA_SERVE_ADMIN_KEY"]["secretKeyRef"]["name"],
                                        "key": "redis-url"}}  # fmt: skip


def test_variable_that_another_names_stands_before_it(renderings: dict[str, Rendered]) -> None:
    """Kubernetes puts $(REDIS_PASSWORD) in only if it is defined further up."""
    names = list(renderings["trial"].environment())
    assert names.index("REDIS_PASSWORD") < names.index("LORA_SERVE_REDIS_URL")
    (redis,) = renderings["trial"].of("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]
    assert redis["args"][-2:] == ["--requirepass", "$(REDISCLI_AUTH)"]
    assert redis["env"][0]["name"] == "REDISCLI_AUTH"


def test_selectors_find_their_own_pods_and_nobody_elses(renderings: dict[str, Rendered]) -> None:
    rendering = renderings["trial"]
    labels = {
        component: rendering.of("StatefulSet", suffix)["spec"]["template"]["metadata"]["labels"]
        for component, suffix in (("server", ""), ("redis", "-redis"))
    }

    def found(selector: dict[str, str]) -> list[str]:
        return [name for name, own in labels.items() if selector.items() <= own.items()]

    for kind, suffix, expected in (
        ("Service", "", "server"), ("Service", "-pods", "server"), ("Service", "-redis", "redis"),
        ("StatefulSet", "", "server"), ("StatefulSet", "-redis", "redis"), ("PodDisruptionBudget", "", "server"),
        ("NetworkPolicy", "", "server"), ("NetworkPolicy", "-redis", "redis"),
    ):  # fmt: skip
        spec = rendering.of(kind, suffix)["spec"]
        selector = spec.get("selector", spec.get("podSelector"))
        assert found(selector.get("matchLabels", selector)) == [expected], (kind, suffix)
    assert found(renderings["gateway"].of("InferencePool")["spec"]["selector"]["matchLabels"]) == ["server"]
    assert found(
        rendering.of("NetworkPolicy", "-redis")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    ) == ["server"]


def test_monitor_scrapes_each_pod_once(renderings: dict[str, Rendered]) -> None:
    """The Service without an address finds the same pods: a monitor that took both would count everything twice."""
    rendering = renderings["cpu"]
    selector = rendering.of("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    found = [item["metadata"]["name"] for item in rendering.documents
             if item["kind"] == "Service" and selector.items() <= item["metadata"]["labels"].items()]  # fmt: skip
    assert found == ["lora-serve"]
    (endpoint,) = rendering.of("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in rendering.of("Service")["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"] == {"name": "lora-serve", "key": "metrics-key"}


def test_replicas_are_the_autoscalers_where_there_is_one(renderings: dict[str, Rendered]) -> None:
    """Or each upgrade would set them back."""
    for name, rendering in renderings.items():
        grows = {"HorizontalPodAutoscaler", "ScaledObject"} & rendering.kinds()
        assert len(grows) == (1 if name in ("hpa", "grows") else 0)
        assert ("replicas" in rendering.of("StatefulSet")["spec"]) == (not grows)
        for kind in grows:
            target = rendering.of(kind)["spec"]["scaleTargetRef"]
            assert target == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "lora-serve"}
    target = renderings["hpa"].of("HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["target"]
    assert target["averageValue"] == "1000000"


def test_traffic_that_is_let_through(renderings: dict[str, Rendered]) -> None:
    def ports(rules: list[dict[str, Any]]) -> list[Any]:
        return [port["port"] for rule in rules for port in rule["ports"]]

    assert ports(renderings["plain"].of("NetworkPolicy")["spec"]["ingress"]) == ["http"]
    for name, expected in (("plain", [53, 53, 6379]), ("cpu", [53, 53, 6380]), ("trial", [53, 53, 6379, 443])):
        assert ports(renderings[name].of("NetworkPolicy")["spec"]["egress"]) == expected
    assert renderings["trial"].of("NetworkPolicy", "-redis")["spec"].get("egress") is None
    assert "NetworkPolicy" not in renderings["alone"].kinds()


def test_names_of_adapters_are_open_to_a_picker_alone(renderings: dict[str, Rendered]) -> None:
    for name, rendering in renderings.items():
        assert rendering.environment().get("LORA_SERVE_METRICS_NAMES") == ("open" if name == "gateway" else None)
    pool = renderings["gateway"].of("InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": renderings["gateway"].server()["ports"][0]["containerPort"]}]
    (rule,) = renderings["gateway"].of("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "lora-serve"}
    ]
    (rule,) = renderings["tls"].of("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "lora-serve", "port": 8000}]


def test_notes_tell_what_to_do_next(renderings: dict[str, Rendered]) -> None:
    for rendering in renderings.values():
        for words in ("create secret generic", "rollout status statefulset/lora-serve", "tenants create", "keys create",
                      "adapters upload", "docs/deploy.md"):  # fmt: skip
            assert words in rendering.notes
    assert "Redis is ONE pod" in renderings["trial"].notes
    assert "deploy/prometheus/adapter-rules.yaml" in renderings["hpa"].notes
    assert "deploy/gateway/endpoint-picker.yaml" in renderings["gateway"].notes
    assert "stays at one replica" in renderings["alone"].notes
    assert json.dumps(renderings["plain"].notes).count("ONE") == 0
