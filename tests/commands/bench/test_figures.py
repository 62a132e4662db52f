"""Figures against numpy, and against numbers worked out by hand."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from lora_serve.commands.bench.report import (
    Chunk,
    LoadResult,
    Objective,
    RequestRecord,
    RunFacts,
    in_flight,
    make_report,
    per_adapter,
    percentile,
    processor,
    processor_words,
    spread_ms,
    summarise,
    tokens_over_time,
)

FACTS = RunFacts("lora_serve", "base", "uniform", 2, 4, None, 0, "lora-serve bench", "0.1", {"start_s": 1.0})


def record(index: int, *times: float, **fields: Any) -> RequestRecord:
    """Sent at 1.0, a token at each time, ended 0.5 after the last."""
    given: dict[str, Any] = {"adapter": None, "planned": 1.0, "ended": times[-1] + 0.5 if times else 2.0, **fields}
    chunks = tuple(Chunk(time, 1) for time in times)
    return RequestRecord(index, prompt_tokens=10, asked_tokens=len(times), sent=1.0, chunks=chunks, **given)


GOOD = record(0, 1.5, 1.6, 1.8, adapter="acme/a")
SLOW = record(1, 3.0, 4.0, planned=0.5)
FAILED = record(2, 2.0, error="http_500", detail="broken", adapter="acme/a")
RESULT = LoadResult(1_700_000_000.0, 5.0, (GOOD, SLOW, FAILED))


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_percentiles_are_numpys(count: int) -> None:
    generator = random.Random(count)
    values = [generator.expovariate(3.0) for _ in range(count)]
    for share in (0, 12.5, 50, 90, 99, 100):
        assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, share))
    found = spread_ms(values)
    assert found["p99"] == pytest.approx(1000 * np.percentile(values, 99), abs=1e-3)
    assert found["mean"] == pytest.approx(1000 * np.mean(values), abs=1e-3)
    assert found["max"] == pytest.approx(1000 * max(values), abs=1e-3)


def test_nothing_measured_is_zero_and_not_an_error() -> None:
    assert set(spread_ms([]).values()) == {0.0}
    empty = make_report(LoadResult(0.0, 0.0, ()), FACTS, Objective(ttft=1.0))
    assert empty["output_tokens_per_s"] == 0.0
    assert empty["goodput"]["share"] == 0.0
    json.dumps(empty, allow_nan=False)


def test_latencies_count_from_the_plan_and_only_answered_requests_count() -> None:
    found = summarise(RESULT)
    assert (found["requests"], found["failed"], found["output_tokens"], found["prompt_tokens"]) == (3, 1, 5, 20)
    assert found["output_tokens_per_s"] == 1.0
    assert found["ttft_ms"]["max"] == 2500.0
    assert found["itl_ms"]["p50"] == pytest.approx(200.0)
    assert found["e2e_ms"]["max"] == 4000.0
    assert found["goodput"] is None


@pytest.mark.parametrize(
    ("objective", "num_met"),
    [
        (Objective(), 2),
        (Objective(ttft=0.6), 1),
        (Objective(ttft=0.4), 0),
        (Objective(itl=0.151), 1),
        (Objective(itl=1.0), 2),
        (Objective(e2e=1.4), 1),
        (Objective(ttft=3.0, e2e=1.2), 0),
    ],
)
def test_goodput_counts_answers_within_every_level(objective: Objective, num_met: int) -> None:
    good = summarise(RESULT, objective)["goodput"]
    assert good["share"] == pytest.approx(num_met / 3, abs=1e-4)
    assert good["requests_per_s"] == pytest.approx(num_met / 5)


def test_requests_under_way_are_those_sent_and_not_ended() -> None:
    found = dict(in_flight(RESULT.records, 5.0, points=5))
    assert found == {0.0: 0, 1.0: 3, 2.0: 3, 3.0: 1, 4.0: 1, 5.0: 0}


def test_tokens_over_time_hold_every_token() -> None:
    bins = tokens_over_time(RESULT.records, 5.0)
    width = bins[1][0] - bins[0][0]
    assert sum(speed * width for _, speed in bins) == pytest.approx(6, rel=0.01)
    assert max(bins, key=lambda pair: pair[1])[0] == pytest.approx(1.6, abs=width)


def test_adapters_are_told_apart_the_most_asked_first() -> None:
    groups = per_adapter(RESULT)
    assert list(groups) == ["acme/a", "(base)"]
    assert (groups["acme/a"]["requests"], groups["acme/a"]["failed"], groups["acme/a"]["output_tokens"]) == (2, 1, 3)
    assert groups["(base)"]["ttft_ms"]["p50"] == 2500.0


def test_a_report_has_the_fields_that_others_read() -> None:
    report = json.loads(json.dumps(make_report(RESULT, FACTS, Objective(ttft=1.0)), allow_nan=False))
    required = "engine model popularity num_adapters concurrency requests failed output_tokens_per_s per_adapter"
    beside = "command date machine versions seed rate duration_s goodput errors in_flight tokens_over_time server"
    assert set(f"{required} {beside}".split()) <= set(report)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert {"p50", "p90", "p99"} <= set(report[name])
    assert report["errors"] == {"http_500": 1}
    assert report["error_examples"] == {"http_500": "broken"}
    assert report["date"] == "2023-11-14T22:13:20+00:00"
    assert report["versions"]["engine"] == "0.1"
    assert report["machine"]["cores"] >= 1


EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu avx avx2 fma

processor\t: 1
flags\t\t: fpu avx2 avx512f
"""
GRAVITON = (
    "processor\t: 0\nFeatures\t: fp asimd bf16 sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\nCPU revision\t: 1\n"
)


def test_a_processor_is_known_by_its_numbers_and_instructions() -> None:
    assert processor(EPYC) == {
        "cpu": "AMD EPYC",
        "cpu_numbers": "family 25, model 1, stepping 1",
        "instructions": ["avx2", "fma"],
        "bf16_instructions": False,
    }
    found = processor(GRAVITON)
    assert found["cpu_numbers"] == "implementer 0x41, part 0xd40, revision 1"
    assert (found["instructions"], found["bf16_instructions"]) == (["asimd", "bf16", "sve"], True)
    for flag in ("avx512_bf16", "amx_bf16"):
        assert processor(EPYC.replace("fma", flag))["bf16_instructions"]
    assert processor("")["cpu"] == "unknown"
    assert processor_words({**processor(EPYC), "cores": 2}) == (
        "AMD EPYC (family 25, model 1, stepping 1), 2 cores, without bf16 instructions"
    )
