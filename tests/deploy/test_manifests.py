"""Every manifest that the chart makes is one that Kubernetes, or the owner of the custom resource, takes."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel

from tests.deploy.rendering import CHART, NAMES, PLAIN, Rendered

# The oldest that Chart.yaml allows, which knows no volumes of images yet, and the newest of the validator's.
OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
SCHEMAS: dict[str, Any] = {}
for file in ("gateway_crds.yaml", "kuberay_crds.yaml"):
    SCHEMAS |= yaml.safe_load(Path(__file__).with_name(file).read_text())


@cache
def custom_resources() -> dict[str, type[BaseModel]]:
    """Models made from the operators' own definitions."""
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

    return {"ScaledObject": ScaledObject, "PrometheusRule": PrometheusRule, "ServiceMonitor": ServiceMonitor}


def check(document: dict[str, Any], version: str = NEWEST) -> None:
    """Raises if a field is unknown, missing or of another type."""
    _check(json.dumps(document, sort_keys=True), version)


@cache
def _check(text: str, version: str) -> None:
    """Many a document is the same with all values."""
    document = json.loads(text)
    kind = document["kind"]
    if kind in SCHEMAS:
        jsonschema.validate(document, SCHEMAS[kind])
        for template in Rendered((document,), "").templates():
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"} | template["metadata"]}
            kubernetes_validate.validate(pod | {"spec": template["spec"]}, version, strict=True)
    elif kind in custom_resources():
        known = custom_resources()[kind].model_validate(document)
        kept = json.loads(known.model_dump_json(by_alias=True, exclude_unset=True))
        assert kept == document, f"{kind}: fields that nobody knows are left out"
    else:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.many(6)
@pytest.mark.parametrize("name", NAMES)
def test_manifests_are_valid(renderings: dict[str, Rendered], name: str) -> None:
    documents = renderings[name].documents
    assert len(documents) >= 5
    for document in documents:
        check(document)
    identities = [(item["kind"], item["metadata"]["name"]) for item in documents]
    assert len(identities) == len(set(identities))


@pytest.mark.many(4)
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpu"}))
def test_manifests_are_valid_in_the_oldest_kubernetes_that_the_chart_allows(
    renderings: dict[str, Rendered], name: str
) -> None:
    assert f">={OLDEST}.0" in yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    for document in renderings[name].documents:
        check(document, OLDEST)


def test_every_kind_is_rendered_somewhere(renderings: dict[str, Rendered]) -> None:
    kinds = set().union(*(rendering.kinds() for rendering in renderings.values()))
    assert kinds == {
        "StatefulSet", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler",
        "ScaledObject", "ServiceMonitor", "PrometheusRule", "ConfigMap", "InferencePool", "HTTPRoute",
        "RayService",
    }  # fmt: skip


def test_a_field_that_nobody_knows_is_seen(renderings: dict[str, Rendered]) -> None:
    """Of each validator: what it lets pass would prove nothing."""
    for name, kind in (
        ("plain", "StatefulSet"), ("hpa", "HorizontalPodAutoscaler"), ("grows", "ScaledObject"),
        ("cpu", "ServiceMonitor"), ("cpu", "PrometheusRule"), ("gateway", "InferencePool"), ("gateway", "HTTPRoute"),
        ("ray", "RayService"),
    ):  # fmt: skip
        broken = copy.deepcopy(renderings[name].of(kind))
        broken["spec"]["noSuchField"] = 1
        with pytest.raises((AssertionError, jsonschema.ValidationError)):
            check(broken)


def test_a_field_that_nobody_knows_is_seen_in_a_pod_of_ray(renderings: dict[str, Rendered]) -> None:
    for i in range(2):
        broken = copy.deepcopy(renderings["ray"].of("RayService"))
        list(Rendered((broken,), "").pods())[i]["containers"][0]["noSuchField"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            check(broken)


def test_helm_finds_the_charts_form_right(said: tuple[Any, dict[str, Any]]) -> None:
    report = said[1]
    assert report["errors"] == []
    assert [item for item in report["messages"] if item["severity"] > 1] == []


def test_defaults_fit_the_schema_but_for_what_is_required() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert set(schema["properties"]) - {"global"} == set(values)
    assert PLAIN.keys() == set(schema["required"])
