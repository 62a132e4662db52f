"""/metrics, read by prometheus_client's own parser."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lora_serve.core.errors import NotReadyError, NumericalError
from lora_serve.core.figures import EvictionReason, TierStats
from lora_serve.core.messages import Timings
from lora_serve.core.stats import STEP_TOKENS, BatchInfo, EngineStats, GraphStats, SpeculationStats
from lora_serve.server.operation.metrics import engine_families, tier_families
from lora_serve.server.telemetry.metrics import Metrics
from tests.mock_engine import MockReply
from tests.server.conftest import leave_in_the_middle

PROMISED = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:lora_requests_info",
    "vllm:cache_config_info", "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count",
    "vllm:request_prompt_tokens_count", "vllm:request_generation_tokens_count",
    "vllm:request_prefill_time_seconds_count", "vllm:request_decode_time_seconds_count",
    "vllm:iteration_tokens_total_count", "process_resident_memory_bytes", "process_cpu_seconds_total",
    "lora_serve_batch_rows", "lora_serve_batch_adapters", "lora_serve_step_seconds",
    "lora_serve_tenant_tokens_total", "lora_serve_tenant_requests_total",
}  # fmt: skip


async def scrape(http: aiohttp.ClientSession) -> dict[str, list[Any]]:
    """Sample name -> its samples."""
    found: dict[str, list[Any]] = {}
    async with http.get("/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


async def complete(http: aiohttp.ClientSession, **body: Any) -> int:
    async with http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 4, **body}) as answer:
        await answer.read()
        return answer.status


async def test_every_promised_name_is_there(http: aiohttp.ClientSession) -> None:
    await complete(http)
    found = await scrape(http)
    assert set(found) >= PROMISED
    assert not [name for name in found if name.endswith("_created")]


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=1.0.0", "text/plain", "*/*"])
async def test_format_is_0_0_4_whatever_the_scraper_asks_for(http: aiohttp.ClientSession, accept: str) -> None:
    async with http.get("/metrics", headers={"Accept": accept}) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "vllm:num_requests_running" in await answer.text()


async def test_requests_and_tokens_are_counted(http: aiohttp.ClientSession) -> None:
    await complete(http)
    await complete(http, n=2)
    found = await scrape(http)
    assert found["vllm:prompt_tokens_total"][0].value == 9
    assert found["vllm:generation_tokens_total"][0].value == 12
    assert found["vllm:time_to_first_token_seconds_count"][0].value == 3
    assert found["vllm:inter_token_latency_seconds_count"][0].value == 9
    assert found["vllm:e2e_request_latency_seconds_count"][0].value == 3
    assert found["vllm:request_prompt_tokens_sum"][0].value == 9
    assert found["vllm:request_generation_tokens_sum"][0].value == 12
    for name in ("request_prefill_time_seconds", "request_decode_time_seconds", "request_generation_tokens"):
        assert found[f"vllm:{name}_count"][0].value == 3
    reasons = {sample.labels["finished_reason"]: sample.value for sample in found["vllm:request_success_total"]}
    assert reasons == {"length": 3, "stop": 0, "abort": 0}
    assert [(sample.labels["tenant"], sample.value) for sample in found["lora_serve_tenant_tokens_total"]] == [
        ("default", 21)
    ]


async def test_failures_and_aborts_are_counted_too(http: aiohttp.ClientSession, house: Any) -> None:
    house.engine.script = lambda request: MockReply(error=NumericalError("x"))
    assert await complete(http) == 500
    house.engine.script = lambda request: MockReply(gate=asyncio.Event())
    await leave_in_the_middle(http, house)
    async with asyncio.timeout(60):
        while house.engine._rows:
            await asyncio.sleep(0.005)
    samples = (await scrape(http))["vllm:request_success_total"]
    assert {sample.labels["finished_reason"]: sample.value for sample in samples}["abort"] == 2


async def test_running_and_waiting_adapters_are_one_sample(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/a", seed=1)
    await house.register("acme/b", seed=2)
    await complete(http, model="acme/a")
    house.engine.script = lambda request: MockReply(gate=asyncio.Event())
    task = asyncio.create_task(complete(http, model="acme/b"))
    async with asyncio.timeout(60):
        while len(house.engine.requests) < 2:
            await asyncio.sleep(0.005)
    samples = (await scrape(http))["vllm:lora_requests_info"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(samples) == 1
    assert samples[0].labels == {
        "max_lora": "4",
        "running_lora_adapters": "acme/a",
        "waiting_lora_adapters": "acme/b",
    }
    assert samples[0].value > 1.7e9


async def test_prompt_tokens_that_wait_are_shown(http: aiohttp.ClientSession, house: Any) -> None:
    house.engine.script = lambda request: MockReply(gate=asyncio.Event())
    task = asyncio.create_task(complete(http))
    async with asyncio.timeout(60):
        while not house.engine.requests:
            await asyncio.sleep(0.005)
    assert (await scrape(http))["lora_serve_waiting_tokens"][0].value == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(60):
        while (await scrape(http))["lora_serve_waiting_tokens"][0].value:
            await asyncio.sleep(0.005)


async def test_dead_engine_takes_only_its_own_figures_away(http: aiohttp.ClientSession, house: Any) -> None:
    async def dead() -> EngineStats:
        raise NotReadyError("dead")

    house.engine.stats = dead
    found = await scrape(http)
    assert "vllm:prompt_tokens_total" in found
    assert "vllm:num_requests_running" not in found
    assert "lora_serve_waiting_tokens" in found


def test_engine_figures_are_translated() -> None:
    batches = (BatchInfo(2, 20, 1, 0.1), BatchInfo(4, 4, 3, 0.3))
    stats = EngineStats(
        1,
        2,
        ("a",),
        (),
        4,
        10,
        4,
        16,
        5,
        (),
        (),
        (),
        recent_batches=batches,
        num_prefix_queries=90,
        num_prefix_hits=64,
        steps_by_tokens=(2, 1, *[0] * (len(STEP_TOKENS) - 2), 1),
        num_step_tokens=20_010,
    )
    samples = {sample.name: sample for family in engine_families(stats, {}) for sample in family.samples}
    assert samples["vllm:kv_cache_usage_perc"].value == pytest.approx(0.6)
    assert samples["vllm:cache_config_info"].labels == {"block_size": "16", "num_gpu_blocks": "10"}
    assert samples["vllm:num_preemptions_total"].value == 5
    assert samples["vllm:prefix_cache_queries_total"].value == 90
    assert samples["vllm:prefix_cache_hits_total"].value == 64
    assert samples["vllm:iteration_tokens_total_sum"].value == 20_010
    assert samples["vllm:iteration_tokens_total_count"].value == 4
    steps = [sample for family in engine_families(stats, {}) for sample in family.samples if sample.name.endswith("et")]
    assert [(steps[at].labels["le"], steps[at].value) for at in (0, 1, -2, -1)] == [
        ("1.0", 2), ("8.0", 3), ("16384.0", 3), ("+Inf", 4),
    ]  # fmt: skip
    assert samples["lora_serve_batch_rows"].value == 3
    assert samples["lora_serve_batch_adapters"].value == 2
    assert samples["lora_serve_step_seconds"].value == pytest.approx(0.2)


def test_figures_of_every_tier_are_translated_and_what_is_not_known_is_left_out() -> None:
    reasons = {EvictionReason.CAPACITY: 3, EvictionReason.SHRUNK: 1}
    disk, far = TierStats(1, 2, 3, 4, 0.5, 6, 7, 8, reasons), TierStats(5, 0, 0, 0, 0.0, None, 0)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in tier_families({"disk": disk, "redis": far})
        for sample in family.samples
    }
    assert found["lora_serve_adapter_hits_total", "disk"] == 1
    assert found["lora_serve_adapter_hits_total", "redis"] == 5
    assert found["lora_serve_adapter_evictions_total", "disk", "capacity"] == 3
    assert found["lora_serve_adapter_evictions_total", "disk", "shrunk"] == 1
    assert found["lora_serve_adapter_evictions_total", "disk", "corrupt"] == 0
    assert found["lora_serve_adapter_load_seconds_sum", "disk"] == 0.5
    assert found["lora_serve_adapter_load_seconds_count", "disk"] == 3
    assert found["lora_serve_adapter_bytes", "disk"] == 6
    assert found["lora_serve_adapter_budget_bytes", "disk"] == 7
    assert found["lora_serve_adapter_count", "disk"] == 8
    assert ("lora_serve_adapter_bytes", "redis") not in found
    assert ("lora_serve_adapter_count", "redis") not in found


def test_ten_thousand_tenants_do_not_grow_the_series_without_bound() -> None:
    metrics = Metrics("base", max_tenants=50)
    for number in range(10_000):
        with metrics.sequence(f"tenant-{number}", 0.0, 1) as timer:
            timer.admitted(Timings(0.0, 0.0, 0.0))
    series = {
        sample.labels["tenant"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "lora_serve_tenant_tokens_total"
    }
    assert len(series) == 51
    assert series["other"] == 10_000 - 50
    assert len(generate_latest(metrics.registry)) < 50_000


def test_tenants_may_have_no_series_at_all() -> None:
    metrics = Metrics("base", max_tenants=0)
    with metrics.sequence("acme", 0.0, 1):
        pass
    assert metrics.registry.get_sample_value("lora_serve_tenant_requests_total", {"tenant": "other"}) == 1


def test_two_applications_in_one_process_do_not_add_up() -> None:
    first, second = Metrics("base"), Metrics("base")
    first.prompt_tokens.inc(5)
    assert second.registry.get_sample_value("vllm:prompt_tokens_total", second.labels) == 0


async def test_registrys_generation_is_shown(http: aiohttp.ClientSession, house: Any) -> None:
    async def scrape() -> dict[str, float]:
        async with http.get("/metrics") as answer:
            lines = (
                line.split(" ") for line in (await answer.text()).splitlines() if line.startswith("lora_serve_reg")
            )
            return {name: float(value) for name, value in lines}

    before = await scrape()
    await house.register("acme/a")
    after = await scrape()
    assert after["lora_serve_registry_generation"] > before["lora_serve_registry_generation"]
    assert after["lora_serve_registry_away"] == 0


def no_figures() -> EngineStats:
    return EngineStats(0, 0, (), (), 1, 1, 1, 16, 0, (), (), ())


def test_captured_steps_are_counted() -> None:
    stats = replace(no_figures(), graphs=GraphStats(7, 5, 1, 2.5, 31.5))
    samples = (sample for family in engine_families(stats, {}) for sample in family.samples)
    found = {sample.name: sample.value for sample in samples if "graph" in sample.name or "layer" in sample.name}
    assert found == {
        "lora_serve_graph_steps_total": 7,
        "lora_serve_graph_captures_total": 5,
        "lora_serve_graph_captures_failed_total": 1,
        "lora_serve_graph_capture_seconds_total": 2.5,
        "lora_serve_layer_compile_seconds_total": 31.5,
    }


def test_guessed_tokens_have_vllms_names_where_tokens_are_guessed() -> None:
    stats = replace(no_figures(), speculation=SpeculationStats(3, 10, 30, 12, (8, 3, 1)))
    names = {"model_name": "m", "engine": "0"}
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in engine_families(stats, names)
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert found == {
        ("vllm:spec_decode_num_drafts_total", None): 10,
        ("vllm:spec_decode_num_draft_tokens_total", None): 30,
        ("vllm:spec_decode_num_accepted_tokens_total", None): 12,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 8,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 3,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 1,
    }
    none = engine_families(replace(stats, speculation=SpeculationStats()), names)
    assert not any("spec_decode" in family.name for family in none)
