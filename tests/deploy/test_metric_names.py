"""Dashboard, alarms, autoscalers and endpoint picker ask for metrics that a real server has, in PromQL that parses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from tests.deploy.rendering import DEPLOY, Rendered

Scraped = dict[str, set[frozenset[str]]]
DASHBOARD = json.loads((DEPLOY / "grafana" / "lora-serve.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
PICKER = yaml.safe_load((DEPLOY / "gateway" / "endpoint-picker.yaml").read_text())["router"]
# What Prometheus adds, by itself or as the ServiceMonitor says.
TARGET = {"job", "instance", "namespace", "pod", "service", "replica", "node"}
PROMETHEUS_OWN = {"up"}


def queries(renderings: dict[str, Rendered]) -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query, variables of Grafana and of the adapter put in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield (
                f"variable {variable['name']}",
                re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])[1],
            )
    for group in ALERTS:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    (trigger,) = renderings["grows"].of("ScaledObject")["spec"]["triggers"]
    yield "KEDA", trigger["metadata"]["query"]
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter-rules.yaml").read_text())["rules"]["custom"]
    yield "adapter, series", rule["seriesQuery"]
    filled = rule["metricsQuery"].replace("<<.Series>>", re.match(r"\w+", rule["seriesQuery"])[0])
    yield "adapter, metric", filled.replace("<<.LabelMatchers>>", 'namespace="a"').replace("<<.GroupBy>>", "pod")


def selectors(expression: Any) -> Iterator[Any]:
    """Every vector selector of a parsed query."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression
        case promql_parser.MatrixSelector():
            yield expression.vector_selector
        case promql_parser.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql_parser.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from selectors(expression.expr)
        case promql_parser.SubqueryExpr():
            yield from selectors(expression.expr)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            pytest.fail(f"unknown part of a query: {expression!r}")


def test_queries_parse_and_ask_for_what_a_server_shows(renderings: dict[str, Rendered], scraped: Scraped) -> None:
    asked = set()
    for place, query in queries(renderings):
        found = list(selectors(promql_parser.parse(query)))
        assert found, place
        for selector in found:
            asked.add(selector.name)
            if selector.name in PROMETHEUS_OWN:
                continue
            assert selector.name in scraped, f"{place}: no server shows {selector.name}"
            labels = {matcher.name for matcher in selector.matchers.matchers} - TARGET
            assert any(labels <= shown for shown in scraped[selector.name]), f"{place}: {selector.name} has no {labels}"
    assert len(asked) > 30


def test_sums_are_by_labels_that_there_are(renderings: dict[str, Rendered], scraped: Scraped) -> None:
    """`sum by (tier)` of a metric without it is one line without a name."""
    for place, query in queries(renderings):
        for labels, name in re.findall(r"\bby \(([\w, ]+)\) \((?:rate\(|increase\()*([\w:]+)[{\[]", query):
            wanted = {label.strip() for label in labels.split(",")} - TARGET
            assert any(wanted <= shown for shown in scraped[name]), f"{place}: {name} has no {wanted}"


def test_tiers_reasons_and_engines_that_are_named_exist(renderings: dict[str, Rendered]) -> None:
    from lora_serve.core.errors import NotReadyError

    text = str(list(queries(renderings)))
    assert set(re.findall(r'tier="(\w+)"', text)) == {"device"}
    assert set(re.findall(r'reason!="(\w+)"', text)) == {NotReadyError.reason}


def test_autoscaler_reads_the_metric_that_the_adapter_makes(renderings: dict[str, Rendered], scraped: Scraped) -> None:
    (metric,) = renderings["hpa"].of("HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter-rules.yaml").read_text())["rules"]["custom"]
    name = metric["pods"]["metric"]["name"]
    assert name == rule["name"]["as"]
    assert re.match(rule["name"]["matches"], name)
    assert name in scraped


def test_picker_reads_metrics_and_labels_that_there_are(scraped: Scraped) -> None:
    config = yaml.safe_load(PICKER["epp"]["pluginsCustomConfig"][PICKER["epp"]["pluginsConfigFile"]])
    types = [plugin["type"] for plugin in config["plugins"]]
    (extractor,) = (plugin for plugin in config["plugins"] if plugin["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    assert engine["name"] == PICKER["modelServers"]["type"]
    specs = {name: value for name, value in engine.items() if name.endswith("Spec")}
    assert set(specs.values()) <= set(scraped)
    (lora,) = scraped[specs["loraSpec"]]
    assert lora == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    (cache,) = scraped[specs["cacheInfoSpec"]]
    assert cache >= {"block_size", "num_gpu_blocks"}
    assert "lora-affinity-scorer" in types
    for profile in config["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= set(types)


def test_picker_and_pool_name_each_other(renderings: dict[str, Rendered]) -> None:
    labels = renderings["gateway"].of("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert PICKER["modelServers"]["matchLabels"].items() <= labels.items()
    assert PICKER["modelServers"]["matchLabels"]["app.kubernetes.io/component"] == "server"
    ref = renderings["gateway"].of("InferencePool")["spec"]["endpointPickerRef"]
    text = (DEPLOY / "gateway" / "endpoint-picker.yaml").read_text()
    (release,) = re.findall(r"helm upgrade --install (\S+) llm-d", text)
    assert ref["name"] == f"{release}-epp"  # as llm-d's chart calls its Service


def test_metric_that_is_dropped_before_prometheus_is_asked_by_nobody(renderings: dict[str, Rendered]) -> None:
    (endpoint,) = renderings["cpu"].of("ServiceMonitor")["spec"]["endpoints"]
    dropped = [rule["regex"] for rule in endpoint["metricRelabelings"] if rule["action"] == "drop"]
    names = {selector.name for _, query in queries(renderings) for selector in selectors(promql_parser.parse(query))}
    assert not [name for name in names for pattern in dropped if re.fullmatch(pattern, name)]
    assert {rule["targetLabel"] for rule in endpoint["relabelings"]} <= TARGET
