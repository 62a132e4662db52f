"""The demo's tenants over HTTP, with guesses and without, with the engine in a thread and in a process of its own."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lora_serve.app.launch import speculation_note
from lora_serve.commands.demo import DATA
from tests.e2e.plain_http import call
from tests.engine_choice import EngineHost, hosted_by

PROMPTS = json.loads((DATA / "prompts.json").read_text())
TOOLS = json.loads((DATA / "tools.json").read_text())
FORMAT = json.loads((DATA / "metadata.json").read_text())["harbor/extract"]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 4, "n": 3, "logprobs": True, "top_logprobs": 2},
    {"stop": [" FROM", "e,"], "logprobs": True},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5, "min_tokens": 8},
]


def bodies() -> list[dict[str, Any]]:
    found = []
    for adapter in sorted({prompt["adapter"] for prompt in PROMPTS}):
        for i, prompt in enumerate([one for one in PROMPTS if one["adapter"] == adapter][:4]):
            chat = {"model": adapter, "messages": [{"role": "user", "content": prompt["prompt"]}], "temperature": 0.0}
            found.append({**chat, "max_tokens": 60, **KINDS[i]})
            if adapter == "harbor/extract":
                found.append({**chat, "max_tokens": 60, **FORMAT, "logprobs": True})
            if adapter == "summit/tools":
                found.append({**chat, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required" if i % 2 else "auto"})
    return found


def answers(host: EngineHost, root: Path, *flags: str) -> tuple[list[Any], dict[str, float]]:
    """The choices of each answer, and the figures of guesses."""
    adapters = [f"{folder.parent.name}/{folder.name}={folder}" for folder in sorted(DATA.glob("adapters/*/*"))]
    arguments = [
        "--model", str(DATA / "model"), "--dtype", "float32", "--store", str(root / "store"),
        "--kv-cache-memory", "32MiB", "--adapter-root", str(DATA / "adapters"), "--max-num-batched-tokens", "128",
        "--lora-modules", *adapters, *flags,
    ]  # fmt: skip
    with host.serving(arguments, root / "log") as server:
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda body: call(f"{server.url}/v1/chat/completions", body), bodies()))
        metrics = call(f"{server.url}/metrics").text
        assert speculation_note(flags[flags.index("--speculate") + 1]) in (root / "log").read_text()
    assert [reply.text for reply in replies if reply.status != 200] == []
    figures = re.findall(r"^vllm:spec_decode_num_(\w+?)_total\{?[^}\n]*\}? (\S+)$", metrics, re.MULTILINE)
    return [reply.json["choices"] for reply in replies], {name: float(value) for name, value in figures}


def without_numbers(value: Any) -> Any:
    """An answer without its log-probabilities, which are rounded differently, and random ids."""
    if isinstance(value, list):
        return [without_numbers(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: without_numbers(one) for key, one in value.items() if key not in ("logprob", "id", "top_logprobs")}


def logprobs_of(choices: list[Any]) -> list[float]:
    return [one["logprob"] for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    found, figures = answers(hosted_by("thread"), tmp_path_factory.mktemp("off"), "--speculate", "off")
    assert not any(figures.values())
    return found


@pytest.mark.nightly  # two servers; by day without HTTP: test_speculation.py
@pytest.mark.engines("process", nightly=["thread"])
def test_tenants_get_the_same_answers(engine_host: EngineHost, wanted: list[Any], tmp_path: Path) -> None:
    found, figures = answers(engine_host, tmp_path, "--speculate", "4")
    for body, one, other in zip(bodies(), found, wanted, strict=True):
        assert without_numbers(one) == without_numbers(other), body
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-3)
    assert figures["draft_tokens"] > figures["accepted_tokens"] > 50
