"""The soak's own judges: what they must find, planted; and a short soak with engines that are killed."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.guest import Guest, copy_with_a_mark
from benchmarks.soak.page import failures, table
from benchmarks.soak.traffic import Break, SoakTraffic
from benchmarks.soak.watching import buckets_in, loop_thread, quantile, since, slopes, usage_of_all
from benchmarks.soak.written import call_fault, json_fault
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.server.telemetry.metrics import LAG_BUCKETS
from tests.canary.questions import BASE
from tests.canary.races import Field
from tests.oracle import save_adapter, save_tiny_model
from tests.rolling.round_robin import Reply

REST = {"descriptors": 40.0, "threads": 12.0}
HOST = {
    "engine": "process",
    "minutes": 20.0,
    "answers": 1000,
    "of_a_form": 400,
    "wrong": 0,
    "first_wrong": [],
    "acts": 90,
    "kills": 3,
    "cut_with_words": 2,
    "memory_mib": [300.0, 310.0, 311.0],
    "slopes_mib_per_minute": {"memory": 0.1, "memory_server": 0.0},
    "at_rest": [REST, REST],
    "lag_p99_ms": 12.0,
    "loop_thread_seconds": {"ran": 300.0, "waited_for_a_processor": 20.0},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wrong": 1, "first_wrong": ["tokens"]}, "1 of 1000 wrong"),
        ({"answers": 0}, "0 of 0 wrong"),
        ({"slopes_mib_per_minute": {"memory": 0.21, "memory_server": 0.0}}, r"memory grows by \+0.21"),
        ({"at_rest": [REST, REST | {"descriptors": 49.0}]}, "descriptors at rest: 40 in the middle, 49"),
        ({"at_rest": [REST, REST | {"threads": 17.0}]}, "threads at rest"),
        ({"lag_p99_ms": 51.0}, "p99 of 51 ms"),
    ],
)
def test_each_bound_that_is_missed_is_a_failure_and_stands_on_the_page(change: dict[str, Any], words: str) -> None:
    assert failures({"hosts": [HOST]}) == []
    assert "missed" not in table({"hosts": [HOST]})
    report = {"hosts": [HOST, {**copy.deepcopy(HOST), **change}]}
    (found,) = failures(report)
    assert re.search(words, found)
    assert "Bounds that were missed" in table(report)


def test_lag_that_other_processes_made_is_no_failure_but_stands_on_the_page() -> None:
    slow = {**HOST, "lag_p99_ms": 51.0}
    waited = {"ran": 300.0, "waited_for_a_processor": HOST["minutes"] * 6.1}
    assert failures({"hosts": [slow]})
    shared = {"hosts": [{**slow, "loop_thread_seconds": waited}]}
    assert failures(shared) == []
    assert "p99 of 51 ms, on shared processors" in table(shared)


def test_slope_of_a_run_of_few_minutes_is_not_judged() -> None:
    steep = {"slopes_mib_per_minute": {"memory": 3.0, "memory_server": 0.0}}
    assert failures({"hosts": [{**HOST, **steep}]})
    assert failures({"hosts": [{**HOST, **steep, "minutes": 8.0}]}) == []


def choice(message: dict[str, Any], reason: str) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": reason}]}


def test_json_that_is_none_or_does_not_fit_its_schema_is_wrong() -> None:
    right = {"city": "Rome", "seats": [1, 40], "is_paid": True}
    assert json_fault(choice({"content": json.dumps(right)}, "stop")) == ""
    for text, reason in (
        (json.dumps(right | {"seats": [41]}), "stop"),
        (json.dumps(right | {"more": 1}), "stop"),
        (json.dumps(right)[:-1], "stop"),
        (json.dumps(right), "length"),
    ):
        assert json_fault(choice({"content": text}, reason)), text


def test_calls_that_are_none_or_do_not_fit_their_tool_are_wrong() -> None:
    def called(name: str, arguments: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": arguments}}

    right = called("pay", '{"number": 7}')
    assert call_fault(choice({"tool_calls": [right]}, "tool_calls")) == ""
    for calls, reason in (
        ([], "tool_calls"),
        ([right, right], "tool_calls"),
        ([right], "length"),
        ([called("fly", "{}")], "tool_calls"),
        ([called("pay", '{"number": 8}')], "tool_calls"),
        ([called("book", '{"number": 7}')], "tool_calls"),
    ):
        assert call_fault(choice({"tool_calls": calls}, reason)), calls


def test_quantile_of_a_histogram_is_prometheus_own() -> None:
    buckets = {0.01: 50.0, 0.05: 90.0, 0.1: 98.0, math.inf: 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.01)
    assert quantile(buckets, 0.7) == pytest.approx(0.03)
    assert quantile(buckets, 0.99) == 0.1  # all that is known of it: it is more
    assert since({0.01: 20.0}, {0.01: 50.0, math.inf: 60.0}) == {0.01: 30.0, math.inf: 60.0}


def test_lag_is_read_from_the_servers_own_metrics() -> None:
    registry = CollectorRegistry()
    lag = Histogram("lora_serve_event_loop_lag_seconds", "Lag.", buckets=LAG_BUCKETS, registry=registry)
    for seconds in (0.004, 0.004, 0.3):
        lag.observe(seconds)
    buckets = buckets_in(generate_latest(registry).decode())
    assert (buckets[0.0025], buckets[0.005], buckets[0.25], buckets[math.inf]) == (0.0, 2.0, 2.0, 3.0)


def test_time_without_a_processor_is_the_loops_own() -> None:
    class Own:
        pid = os.getpid()

    before = loop_thread(Own)  # type: ignore[arg-type]
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    ran, waited = (later - earlier for later, earlier in zip(loop_thread(Own), before, strict=True))  # type: ignore[arg-type]
    assert ran > 0.02
    assert waited >= 0


def test_slope_is_of_all_processes_and_of_each_part() -> None:
    samples = [
        {"at": 6.0 * n, "memory": 10 + n, "memory_server": n, "memory_engines": 10.0, "memory_others": 0.0}
        for n in range(5)
    ]
    assert slopes(samples) == {
        "memory": 10.0, "memory_server": 10.0, "memory_engines": 0.0, "memory_others": 0.0
    }  # fmt: skip


def test_usage_is_of_a_process_and_its_children() -> None:
    class Own:
        pid = os.getpid()

    alone = usage_of_all(Own)  # type: ignore[arg-type]
    with subprocess.Popen(["sleep", "60"]) as child:
        both = usage_of_all(Own)  # type: ignore[arg-type]
        child.kill()
    assert both["processes"] == alone["processes"] + 1
    assert both["memory_others"] > alone["memory_others"]
    assert both["memory"] >= both["memory_server"] + both["memory_others"]


def test_adapter_with_a_mark_has_another_digest_and_the_same_weights(tmp_path: Path) -> None:
    folder = save_adapter(save_tiny_model("llama", tmp_path / "model"), tmp_path / "adapter")
    copied = copy_with_a_mark(folder, tmp_path / "copy", "visitor-1")
    assert adapter_digest(copied) != adapter_digest(folder)
    weights = "adapter_model.safetensors"
    assert (copied / weights).read_bytes() == (folder / weights).read_bytes()


def failed_stream(code: str, message: str, tokens: list[int]) -> tuple[Reply, list[Any]]:
    shown = {"choices": [{"logprobs": {"tokens": [f"token_id:{token}" for token in tokens]}}]}
    reply = Reply(200, {"X-Adapter-Digest": "one"}, b"", 10.0, 11.0, is_repeated=False)
    return reply, [shown, {"error": {"code": code, "message": message}}]


@pytest.mark.parametrize(
    ("code", "message", "tokens", "since_kill", "num_wrong"),
    [
        ("engine_restarted", "try again", [1, 2], 10.5, 0),
        ("engine_restarted", "try again", [1, 3], 10.5, 1),  # what had come was wrong
        ("engine_restarted", "try again", [1, 2], 12.0, 1),  # nothing was broken then
        ("engine_restarted", "alas", [1, 2], 10.5, 1),
        ("internal_error", "try again", [1, 2], 10.5, 1),
    ],
)
async def test_stream_may_fail_by_a_kill_alone_and_with_words(
    code: str, message: str, tokens: list[int], since_kill: float, num_wrong: int
) -> None:
    runners = Field({}, {"one": [((1, 2, 5, 6), torch.zeros(4))]})
    traffic = SoakTraffic(client=None, admin={}, runners=runners)  # type: ignore[arg-type]
    traffic.ledger.means("acme/x", "one", 1.0).answered = 2.0
    traffic.breaks.append(Break(since_kill, since_kill + 1))
    reply, events = failed_stream(code, message, tokens)
    traffic._failed_within("acme", "acme/x", 0, reply, events)
    assert len(traffic.wrong) == num_wrong
    assert traffic.in_doubt == {"acme"}


def test_guest_whose_request_was_sent_twice_may_have_used_its_minute_up() -> None:
    runners = Field({}, {"one": [((1, 2, 5, 6), torch.zeros(4))]})
    traffic = SoakTraffic(client=None, admin={}, runners=runners)  # type: ignore[arg-type]
    tokens = json.dumps({"choices": [{"logprobs": {"tokens": ["token_id:1", "token_id:2"]}}]}).encode()
    for is_repeated, num_wrong in ((False, 1), (True, 0)):
        traffic.wrong.clear()
        guest = Guest(traffic, 7)
        guest._judge(Reply(200, {"X-Adapter-Digest": "d"}, tokens, 1.0, 2.0, is_repeated=is_repeated), "d", (1, 2))
        guest._judge(Reply(429, {"X-Adapter-Digest": "d"}, b"", 3.0, 4.0, is_repeated=False), "d", (1, 2))
        assert len(traffic.wrong) == num_wrong
    guest._judge(Reply(200, {"X-Adapter-Digest": "e"}, tokens, 1.0, 2.0, is_repeated=False), "d", (1, 2))
    guest._judge(Reply(200, {"X-Adapter-Digest": "d"}, tokens, 1.0, 2.0, is_repeated=False), "d", (1, 3))
    assert len(traffic.wrong) == 2


@pytest.mark.parametrize(
    ("numbers", "indices", "num_wrong"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3), 0),
        ((0, 2, 1, 3), (0, 1, 2, 3), 2),  # two answers in each other's place
        ((0, 1, 2, 3), (1, 0, 2, 3), 1),
        ((0, 1, 2), (0, 1, 2), 1),
    ],
)
async def test_answers_to_several_prompts_are_each_held_against_its_own(
    numbers: tuple[int, ...], indices: tuple[int, ...], num_wrong: int
) -> None:
    choices = [
        {"index": index, "logprobs": {"tokens": [f"token_id:{number}"]}}
        for number, index in zip(numbers, indices, strict=True)
    ]
    body = json.dumps({"choices": choices, "usage": {"total_tokens": 9}}).encode()

    class Client:
        async def send(self, *_: Any, **__: Any) -> Reply:
            return Reply(200, {"X-Adapter-Digest": BASE}, body, 1.0, 2.0, is_repeated=False)

    runners = Field({}, {BASE: [((number,), torch.zeros(1)) for number in range(4)]})
    traffic = SoakTraffic(client=Client(), admin={}, runners=runners, secrets={"acme": "s"})  # type: ignore[arg-type]
    traffic._name = lambda *_: BASE  # type: ignore[method-assign]
    await traffic._ask_for_all("acme", random.Random(1))
    assert len(traffic.wrong) == num_wrong
    assert traffic.num_answers == 4
    assert traffic.ledger.tokens["acme"] == 9


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["process", "ray"])
def test_short_soak_has_no_wrong_answer(tmp_path: Path, engine: str) -> None:
    """Its minutes are too few for a slope."""
    out = tmp_path / "soak.json"
    soak.main(["--minutes", "2", "--engines", engine, "--out", str(out), "--no-docs"])
    (host,) = json.loads(out.read_text())["hosts"]
    assert (host["wrong"], host["first_wrong"]) == (0, [])
    assert host["kills"] >= 1
    assert host["answers"] > 500
    assert host["guests"] > 10
