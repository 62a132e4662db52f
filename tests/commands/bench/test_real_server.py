"""The bench against real server processes: the bundled demo model, and random weights checked against PEFT."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lora_serve.cli import main
from lora_serve.commands.bench.discovery import find_words
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.running import BASE, SpawnConfig, Spawned, spawned
from lora_serve.commands.bench.workload import AdapterField, Plan, PlannedRequest, Target
from lora_serve.commands.demo import DATA, adapter_folders
from lora_serve.commands.server_process import ServerProcess
from lora_serve.random_weights import checkpoints as random_model
from lora_serve.random_weights.checkpoints import make_adapters, make_model

PROMPT = (11, 222, 3333, 44, 5)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("demo")
    arguments = ["--model", str(DATA / "model"), "--served-model-name", "demo", "--store", str(folder / "store")]
    arguments += ["--warmup", "off", "--dtype", "float32"]
    arguments += ["--lora-modules", *(f"{name}={path}" for name, path in sorted(adapter_folders().items())[:4])]
    with ServerProcess(arguments, folder / "log") as server:
        server.wait_until_ready(90)
        yield server


def test_the_demo_server_is_measured_and_every_token_counted(
    demo: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([
        "bench", "--url", demo.url, "--adapters", "4", "--popularity", "distinct", "--num-requests", "12",
        "--concurrency", "4", "--prompt-tokens", "4-20", "--output-tokens", "3-9", "--warmup-requests", "4",
        "--out", str(tmp_path), "--json",
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["error_examples"]
    assert (report["engine"], report["model"], report["requests"]) == ("lora_serve", "demo", 12)
    assert report["token_counts"] == {"continuous": 12}
    assert report["ended_early"] == 0
    assert {group["requests"] for group in report["per_adapter"].values()} == {3}
    assert len(report["per_adapter"]) == 4
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize("adapter_field", ["model", "adapter_id", "header"])
async def test_the_server_understands_each_way_to_name_an_adapter(
    demo: ServerProcess, adapter_field: AdapterField
) -> None:
    names = [None, *sorted(adapter_folders())[:2]]
    requests = [PlannedRequest(tuple(range(20, 40)), name, 8) for name in names]
    by_model = await run_load(Target(demo.url, "demo"), Plan(requests, 1))
    found = await run_load(Target(demo.url, "demo", adapter_field=adapter_field), Plan(requests, 1))
    assert not found.failed
    assert [record.text for record in found.records] == [record.text for record in by_model.records]
    assert [record.output_tokens for record in found.records] == [8, 8, 8]


async def test_chat_and_text_prompts_are_answered_and_words_come_from_the_server(demo: ServerProcess) -> None:
    words = await find_words(demo.url, None, 500, seed=1)
    assert len(words) >= 24
    for endpoint in ("chat", "completions"):
        target = Target(demo.url, "demo", endpoint)  # type: ignore[arg-type]
        result = await run_load(target, Plan([PlannedRequest(" ".join(words[:9]), None, 5)], 1))
        assert result.failed == ()
        assert result.records[0].output_tokens == 5


async def test_an_unknown_adapter_is_a_failed_request_and_no_crash(demo: ServerProcess) -> None:
    result = await run_load(Target(demo.url, "demo"), Plan([PlannedRequest((20, 21), "nobody/none", 2)], 1))
    assert result.records[0].error == "http_404"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SpawnConfig, Spawned]]:
    cache = tmp_path_factory.mktemp("cache")
    config = SpawnConfig("tiny", 3, (2, 4), cache, ("--dtype", "float32", "--warmup", "off"), seed=1)
    with spawned(config) as server:
        yield config, server


def oracle(model: Path, adapter: Path | None) -> torch.Tensor:
    """PEFT's log-probabilities after PROMPT, in float32."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, at what PEFT calls
            network = peft.PeftModel.from_pretrained(network, str(adapter))
    with torch.inference_mode():
        logits = network.eval()(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    return torch.log_softmax(logits, -1)


async def top(url: str, model: str) -> dict[int, float]:
    body = {"model": model, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0, "logprobs": 5}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    (found,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return {int(word.strip().removeprefix("t")): value for word, value in found.items()}


@pytest.mark.nightly
async def test_peft_loads_the_adapters_made_by_hand_and_agrees_with_the_server(
    own: tuple[SpawnConfig, Spawned],
) -> None:
    config, server = own
    model = make_model(config.cache, "tiny", config.seed)
    folders = make_adapters(config.cache, "tiny", 3, config.seed, config.ranks)
    assert tuple(folders) == server.adapters
    seen = []
    for name, folder in [(BASE, None), *folders.items()]:
        expected, found = await asyncio.to_thread(oracle, model, folder), await top(server.process.url, name)
        assert len(found) == 5
        for token, value in found.items():
            assert value == pytest.approx(float(expected[token]), abs=1e-3)
        seen.append(frozenset(found))
    assert len(set(seen)) == 4
    assert server.start_seconds > 0
    assert (server.peak_rss() or 0) > 2**26


def test_a_model_in_shards_is_the_model_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_model(tmp_path / "whole", "tiny", 0)
    monkeypatch.setattr(random_model, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(random_model, "_write_tokenizer", lambda folder, vocab_size: None)
    sharded = make_model(tmp_path / "sharded", "tiny", 0)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (whole, sharded))
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
        assert tensor.dim() == 1 or tensor.std() > 0.01


@pytest.mark.parametrize("shape", ["135m", "0.5b", "1b", "8b"])
def test_shapes_have_the_sizes_of_the_models_they_are_named_after(shape: str) -> None:
    from lora_serve.random_weights import SHAPES
    from lora_serve.random_weights.checkpoints import network_of

    billions = {"135m": 0.1345, "0.5b": 0.402, "1b": 1.236, "8b": 8.03}
    _, network = network_of(SHAPES[shape])
    total = sum(parameter.numel() for name, parameter in network.named_parameters() if name != "lm_head.weight")
    total += 0 if SHAPES[shape].is_tied else network.lm_head.weight.numel()
    assert total / 1e9 == pytest.approx(billions[shape], rel=0.005)


@pytest.mark.nightly  # by day: the demo's server is measured
def test_spawn_measures_a_server_of_its_own_and_stops_it(
    own: tuple[SpawnConfig, Spawned], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([
        "bench", "--spawn", "--shape", "tiny", "--adapters", "2", "--ranks", "2,4", "--seed", "1",
        "--num-requests", "4", "--output-tokens", "4", "--cache", str(own[0].cache), "--json",
        "--server-flags", "--max-loras 1 --warmup off",
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["error_examples"]
    assert report["server"]["shape"] == "tiny"
    assert report["server"]["peak_rss_bytes"] > 2**26
    assert (report["requests"], report["output_tokens"]) == (4, 16)


def test_a_server_that_does_not_start_is_code_1_with_its_own_words(
    own: tuple[SpawnConfig, Spawned], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "--spawn", "--shape", "tiny", "--adapters", "1", "--ranks", "2,4", "--seed", "1",
                 "--cache", str(own[0].cache), "--server-flags=--no-such-flag"])  # fmt: skip
    assert code == 1
    assert "no-such-flag" in capsys.readouterr().err
