"""Every kind of request over HTTP, of a server with guesses and of one without: the same answers, byte by byte.

But for ids, times and the last bits of log-probabilities: the demo's head is its embedding too, so torch multiplies it.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lora_serve.commands.demo import DATA
from tests.e2e.plain_http import call
from tests.e2e.test_speculation_over_http import FORMAT, PROMPTS, TOOLS
from tests.engine_choice import EngineHost, hosted_by

pytestmark = pytest.mark.nightly
CACHED = {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "input_tokens"}  # who came first
VARYING = CACHED | {
    "id",
    "created",
    "created_at",
    "completed_at",
    "system_fingerprint",
    "call_id",
    "item_id",
    "metrics",
}
NUMBERS = {"logprob", "logprobs", "token_logprobs", "top_logprobs", "prompt_logprobs"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "n": 2, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "seed": 4, "n": 3},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"temperature": 0.0, "stop": ["e,", " FROM", '": '], "include_stop_str_in_output": True},
    {"temperature": 0.0, "stop_token_ids": [260, 300, 301], "min_tokens": 12},
    {"temperature": 0.0, "logit_bias": {"300": 4.0, "301": -100}},
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 90},
]
ADAPTERS = ("harbor/extract", "acme/sql", "mirror/reverse", "chronos/dates")


def texts(adapter: str) -> list[str]:
    return [prompt["prompt"] for prompt in PROMPTS if prompt["adapter"] == adapter]


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and what is asked there."""
    for number, sampling in enumerate(SAMPLING):
        for adapter in (ADAPTERS[number % 4], "harbor/extract"):
            text = texts(adapter)[number]
            ask = {"max_tokens": 48, **sampling}
            priority = {"priority": number % 3}
            yield CHAT, {"model": adapter, "messages": [{"role": "user", "content": text}], **ask, **priority}
            if "top_logprobs" in ask:
                ask = {**ask, "logprobs": ask.pop("top_logprobs")}
            yield COMPLETIONS, {"model": adapter, "prompt": (text + " ") * 3, **ask}
    text = texts("harbor/extract")[20]
    said = {"model": "harbor/extract", "messages": [{"role": "user", "content": text}], "temperature": 0.0}
    plain = {"model": "harbor/extract", "max_tokens": 40, "temperature": 0.0}
    yield CHAT, {**said, **FORMAT, "max_tokens": 60, "logprobs": True}
    yield COMPLETIONS, {**plain, "prompt": [text, text * 2, "once upon a time"], "echo": True, "logprobs": 2}
    yield COMPLETIONS, {**plain, "prompt": text, "best_of": 3, "n": 2, "temperature": 0.9, "seed": 2}
    yield COMPLETIONS, {"prompt": text * 2, "adapters": [{"id": "harbor/extract"}, {"id": "acme/sql", "scale": 0.3}],
                        "max_tokens": 40, "temperature": 0.0}  # fmt: skip
    for question in texts("summit/tools")[:3]:
        asked = {"model": "summit/tools", "messages": [{"role": "user", "content": question}], "tools": TOOLS}
        named = {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}
        for choice in ("auto", "required", named):
            yield CHAT, {**asked, "tool_choice": choice, "max_tokens": 60, "temperature": 0.0}
    yield "/v1/responses", {"model": "harbor/extract", "input": text, "max_output_tokens": 48, "temperature": 0.0}
    yield "/v1/messages", {**said, "max_tokens": 48}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Each of them whole and as a stream, where there is one."""
    return [
        (path, one)
        for path, body in bodies()
        for one in (body, streamed(path, body))
        if not ("best_of" in body and "stream" in one)
    ]


def streamed(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same request as a stream."""
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    return {**body, "stream": True, **options}


def without_varying(value: Any) -> Any:
    """An answer without ids, times and log-probabilities."""
    if isinstance(value, list):
        return [without_varying(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: without_varying(one) for key, one in value.items() if key not in VARYING | NUMBERS}


def numbers(value: Any, key: str = "") -> list[float]:
    """The log-probabilities of an answer, in order."""
    if isinstance(value, dict):
        return [number for name, one in value.items() for number in numbers(one, name if name in NUMBERS else key)]
    if isinstance(value, list):
        return [number for one in value for number in numbers(one, key)]
    return [value] if key and isinstance(value, float) else []


def joined(text: str) -> Any:
    """A stream as its texts joined, by where they stand; and all that is said beside them, sorted."""
    parts: dict[str, str] = {}
    rest: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[6:])
            _gather(event, f"{event.get('type', '')}", parts, rest)
    return parts, sorted(rest, key=str)


def _gather(value: Any, place: str, parts: dict[str, str], rest: list[Any]) -> None:
    if isinstance(value, list):
        for one in value:
            number = one.get("index", 0) if isinstance(one, dict) else 0
            _gather(one, f"{place}[{number}]", parts, rest)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key in VARYING | NUMBERS or key in ("sequence_number", "token_ids"):
                continue
            if isinstance(one, str) and key in ("text", "content", "delta", "arguments", "partial_json"):
                parts[f"{place}.{key}"] = parts.get(f"{place}.{key}", "") + one
            elif key in ("finish_reason", "stop_reason", "usage", "status") and one is not None:
                rest.append((place, key, without_varying(one)))
            else:
                _gather(one, f"{place}.{key}", parts, rest)


def metric(text: str, name: str) -> float:
    return sum(float(found) for found in re.findall(rf"^{re.escape(name)}(?:{{[^}}\n]*}})? (\S+)$", text, re.MULTILINE))


@contextmanager
def server_of(host: EngineHost, root: Path, *flags: str) -> Iterator[str]:
    adapters = [f"{folder.parent.name}/{folder.name}={folder}" for folder in sorted(DATA.glob("adapters/*/*"))]
    arguments = [
        "--model", str(DATA / "model"), "--dtype", "float32", "--store", str(root / "store"), "--adapter-root",
        str(DATA / "adapters"), "--max-num-batched-tokens", "128", "--lora-modules", *adapters, *flags,
    ]  # fmt: skip
    with host.serving(arguments, root / "log") as server:
        yield server.url


def ask_all(url: str) -> list[Any]:
    """Twelve at a time; a stream finds its prompt in the prefix cache."""
    asked = requests()
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda one: call(url + one[0], one[1]), asked))
    assert [reply.text for reply in replies if reply.status != 200] == []
    return [joined(reply.text) if body.get("stream") else reply.json
            for (_, body), reply in zip(asked, replies, strict=True)]  # fmt: skip


def leave_early(url: str) -> None:
    """Streams that are read for one event and closed."""
    host = url.removeprefix("http://")
    for text in texts("harbor/extract")[:6]:
        connection = http.client.HTTPConnection(host, timeout=60)
        body = {"model": "harbor/extract", "prompt": text * 3, "max_tokens": 200, "ignore_eos": True, "stream": True}
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().readline().startswith(b"data: ")
        connection.close()


def wait_until_idle(url: str) -> str:
    """The metrics, once nothing runs and all blocks are free."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        text = call(f"{url}/metrics").text
        if metric(text, "vllm:num_requests_running") == 0 and metric(text, "vllm:kv_cache_usage_perc") == 0:
            return text
        time.sleep(0.1)
    raise AssertionError("rows that nobody waits for hold blocks")


ROOMY = ("--kv-cache-memory", "32MiB")
TIGHT = ("--kv-cache-memory", "1536KiB", "--policy", "priority", "--max-num-seqs", "12", "--max-model-len", "320")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with server_of(hosted_by("thread"), tmp_path_factory.mktemp("off"), "--speculate", "off", *ROOMY) as url:
        return ask_all(url)


@pytest.mark.parametrize("flags", [("4", *ROOMY), ("auto", *ROOMY), ("4", *TIGHT)], ids=["4", "auto", "preempting"])
def test_answers_are_those_of_a_server_without_guesses(
    engine_host: EngineHost, flags: tuple[str, ...], wanted: list[Any], tmp_path: Path
) -> None:
    with server_of(engine_host, tmp_path, "--speculate", *flags) as url:
        leave_early(url)
        wait_until_idle(url)
        found = ask_all(url)
        metrics = wait_until_idle(url)
    for (_, body), one, other in zip(requests(), found, wanted, strict=True):
        assert without_varying(one) == without_varying(other), body
        assert numbers(one) == pytest.approx(numbers(other), abs=1e-3), body
    assert metric(metrics, "vllm:spec_decode_num_accepted_tokens_total") > 100
    assert (metric(metrics, "vllm:num_preemptions_total") > 0) == ("priority" in flags)
