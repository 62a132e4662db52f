"""The dashboard is one that Grafana's own library reads without losing anything, and shows what was asked for."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.rendering import DEPLOY, Rendered

TEXT = (DEPLOY / "grafana" / "lora-serve.json").read_text()
DASHBOARD: dict[str, Any] = json.loads(TEXT)


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """What is in `given` and not, or otherwise, in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        missing = [f"{place}/{key}" for key in given if key not in kept]
        return missing + [
            f for key in given.keys() & kept.keys() for f in lost(given[key], kept[key], f"{place}/{key}")
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            f for i, (one, other) in enumerate(zip(given, kept, strict=True)) for f in lost(one, other, f"{place}/{i}")
        ]
    return [] if given == kept else [place]


def kept(dashboard: dict[str, Any]) -> Any:
    return json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))


def test_grafana_reads_all_of_it() -> None:
    assert lost(DASHBOARD, kept(DASHBOARD)) == []
    assert lost({**DASHBOARD, "colour": 1}, kept({**DASHBOARD, "colour": 1})) == ["/colour"]


def test_panels_stand_beside_one_another() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not places & cells, panel["title"]
        places |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_every_query_is_for_the_chosen_replicas_and_source() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("{") == target["expr"].count('replica=~"$replica"')


def test_subjects_are_shown() -> None:
    asked = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ()))
    for name in (
        "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_waiting",
        "vllm:inter_token_latency_seconds_bucket", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
        "lora_serve_adapter_loads_total", "lora_serve_adapter_hits_total", "vllm:prefix_cache_hits_total",
        "lora_serve_requests_refused_total", "vllm:request_success_total", "lora_serve_registry_away",
        "vllm:spec_decode_num_accepted_tokens_total", "process_resident_memory_bytes", "lora_serve_waiting_tokens",
    ):  # fmt: skip
        assert name in asked, name


def test_configmap_holds_the_dashboard_and_the_rule_holds_the_alarms(renderings: dict[str, Rendered]) -> None:
    import yaml

    data = renderings["cpu"].of("ConfigMap", "-dashboard")["data"]
    assert json.loads(data["lora-serve.json"]) == DASHBOARD
    own = 'job="lora-serve", namespace="ai", service="lora-serve"'
    alarms = (DEPLOY / "prometheus" / "alerts.yaml").read_text().replace('job="lora-serve"', own)
    assert renderings["cpu"].of("PrometheusRule")["spec"] == yaml.safe_load(alarms)
