"""`lora-serve bench` against a server that behaves like vLLM: from the command line to report and exit code."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lora_serve.cli import main
from lora_serve.commands.bench import without_secrets
from lora_serve.commands.bench.discovery import PLAIN_WORDS, discover, find_words
from tests.commands.bench.fake_server import Call, Fake, fake_server

CARDS = [
    {"id": "base", "owned_by": "vllm", "parent": None, "max_model_len": 300},
    *({"id": f"acme/{name}", "owned_by": "vllm", "parent": "base"} for name in "abc"),
]
PAGES = {"/v1/models": {"data": CARDS}, "/tokenizer_info": {"vocab_size": 500}, "/version": {"version": "0.9"}}
Bench = Callable[..., Awaitable["Ended"]]


class Ended:
    """How the command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def report(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in ("LORA_SERVE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    async def run(fake: Fake, *arguments: str) -> Ended:
        capsys.readouterr()
        code = await asyncio.to_thread(main, ["bench", "--url", fake.url, *arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


async def exact(call: Call) -> web.StreamResponse:
    """As many tokens as were asked for, two in each chunk."""
    total = call.body["max_tokens"]
    for done in range(0, total, 2):
        await call.chunk("a b", usage={"prompt_tokens": 7, "completion_tokens": min(total, done + 2)})
        await asyncio.sleep(0.002)
    await call.chunk("", "length", usage={"prompt_tokens": 7, "completion_tokens": total})
    return await call.done()


async def every_other(call: Call) -> web.StreamResponse:
    if len(call.body["prompt"]) % 2:
        return web.json_response({"error": {"message": "slow down"}}, status=429)
    return await exact(call)


async def test_a_run_ends_well_with_a_table_and_writes_report_and_picture(bench: Bench, tmp_path: Path) -> None:
    async with fake_server(exact, PAGES) as fake:
        ended = await bench(
            fake, "--adapters", "2", "--num-requests", "12", "--concurrency", "4", "--output-tokens", "5-9",
            "--out", str(tmp_path / "new"), "--slo", "ttft:5000,itl:5000", "--seed", "3", "--api-key", "secret",
        )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "time to first token" in ended.out
    assert "12 in " in ended.out
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    facts = {"engine": "vllm", "model": "base", "popularity": "uniform", "num_adapters": 2, "concurrency": 4, "seed": 3}
    assert {name: report[name] for name in facts} == facts
    assert (report["requests"], report["failed"], report["rate"]) == (12, 0, None)
    assert report["token_counts"] == {"continuous": 12}
    assert report["goodput"]["share"] == 1.0
    assert set(report["per_adapter"]) == {"acme/a", "acme/b"}
    assert report["versions"]["engine"] == "0.9"
    assert report["output_tokens"] == sum(body["max_tokens"] for body in fake.bodies)
    assert "secret" not in json.dumps(report)
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG")


async def test_type_kernels_and_processor_are_told_where_the_server_tells_them(bench: Bench) -> None:
    kernels = {"level": "amx", "dtype": "bfloat16", "order": "blocks", "source": "shipped"}
    told = {**PAGES, "/version": {"version": "1", "kernels": {**kernels, "more": {"no": "text"}}}}
    arguments = ("--num-requests", "2", "--output-tokens", "3")
    async with fake_server(exact, told) as fake:
        assert "bfloat16, kernels amx (shipped)" in (await bench(fake, *arguments)).out
        report = (await bench(fake, *arguments, "--json")).report
    assert report["kernels"] == kernels
    assert {"cpu", "cpu_numbers", "instructions", "bf16_instructions"} <= set(report["machine"])
    for kernels_page in ({}, {"kernels": None}, {"kernels": "none"}):
        async with fake_server(exact, {**PAGES, "/version": {"version": "1", **kernels_page}}) as fake:
            out = (await bench(fake, *arguments)).out
        assert "numbers" not in out
        assert "(this machine)" in " ".join(out.split())


async def test_one_failed_request_makes_the_exit_code_1_and_the_report_is_written(bench: Bench, tmp_path: Path) -> None:
    async with fake_server(every_other, PAGES) as fake:
        ended = await bench(fake, "--num-requests", "10", "--out", str(tmp_path), "--json")
    assert ended.code == 1
    assert 0 < ended.report["failed"] < 10
    assert ended.report["errors"] == {"http_429": ended.report["failed"]}
    assert "slow down" in ended.report["error_examples"]["http_429"]
    assert json.loads((tmp_path / "report.json").read_text()) == ended.report


async def test_without_matplotlib_the_json_is_written_and_the_lack_is_told(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    async with fake_server(exact, PAGES) as fake:
        ended = await bench(fake, "--num-requests", "2", "--out", str(tmp_path))
    assert ended.code == 0
    assert "no report.png: matplotlib is not installed" in ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


async def test_an_open_loop_of_some_seconds_sends_at_the_rate(bench: Bench) -> None:
    async with fake_server(exact, PAGES) as fake:
        ended = await bench(fake, "--rate", "40", "--duration", "1", "--output-tokens", "2", "--json")
    assert ended.code == 0
    assert 20 < ended.report["requests"] < 65
    assert ended.report["concurrency"] is None
    assert ended.report["rate"] == 40
    assert ended.report["sent_late_ms"]["p50"] < 100


async def test_a_trace_is_sent_in_its_own_times_compressed(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:0{second}.000000,{40 + second},3" for second in range(4)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    async with fake_server(exact, PAGES) as fake:
        ended = await bench(
            fake, "--trace", str(trace), "--speed", "10", "--adapters", "3", "--popularity", "skewed", "--json"
        )
    assert ended.code == 0
    assert [len(body["prompt"]) for body in fake.bodies] == [40, 41, 42, 43]
    assert 0.3 < ended.report["duration_s"] < 3


async def test_names_may_be_given_by_hand_or_by_a_pattern(bench: Bench) -> None:
    async with fake_server(exact, PAGES) as fake:
        await bench(fake, "--adapters", "x,y", "--popularity", "distinct", "--num-requests", "4", "--concurrency", "1")
        await bench(fake, "--adapters", "2", "--adapter-name-pattern", "t/{:02d}", "--num-requests", "2")
    assert [body["model"] for body in fake.bodies][:4] == ["x", "y", "x", "y"]
    assert {body["model"] for body in fake.bodies[4:]} == {"t/00", "t/01"}


async def test_chat_is_sent_as_text_of_the_servers_own_words(bench: Bench) -> None:
    async def chat(call: Call) -> web.StreamResponse:
        await call.event({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]})
        return await call.done()

    async with fake_server(chat, PAGES) as fake:
        ended = await bench(fake, "--endpoint", "chat", "--num-requests", "2", "--prompt-tokens", "20", "--json")
    (message,) = fake.bodies[0]["messages"]
    assert len(message["content"].split()) == 20
    assert set(message["content"].split()) <= set(PLAIN_WORDS)  # the fake spells no token
    assert ended.report["ended_early"] == 2
    assert ended.report["token_counts"] == {"chunks": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapters", "9"], "the server lists 3"),
        (["--prompt-tokens", "x"], "--prompt-tokens: expected tokens"),
        (["--burstiness", "2"], "--burstiness: goes with --arrival gamma"),
        (["--arrival", "gamma"], "needs a --rate"),
        (["--speed", "2"], "--speed: is the pace of a --trace"),
        (["--spawn"], "--spawn: starts a server of its own"),
        (["--endpoint", "chat", "--prompt-form", "ids"], "chat takes text"),
        (["--slo", "tbt:5"], "--slo: expected levels"),
        (["--trace", "/nowhere.csv"], "cannot be read"),
        (["--adapters", "3", "--adapter-name-pattern", "a"], "has no place for a number"),
        (["--concurency", "3"], "did you mean --concurrency"),
    ],
)
async def test_a_wrong_command_line_is_told_in_one_line_with_code_2(
    bench: Bench, arguments: list[str], message: str
) -> None:
    async with fake_server(exact, PAGES) as fake:
        ended = await bench(fake, *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert fake.calls == []


async def test_a_server_that_does_not_say_its_vocabulary_wants_the_flag(bench: Bench) -> None:
    async with fake_server(exact, {"/v1/models": {"data": CARDS}}) as fake:
        refused = await bench(fake, "--num-requests", "1")
        ended = await bench(fake, "--num-requests", "1", "--vocab-size", "50")
    assert (refused.code, ended.code) == (2, 0)
    assert "--vocab-size" in refused.err
    assert max(fake.bodies[0]["prompt"]) < 50


def test_nobody_at_the_url_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", "--num-requests", "1"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err


async def test_llama_cpp_is_asked_for_its_adapters_and_its_vocabulary() -> None:
    pages = {
        "/v1/models": {"data": [{"id": "m.gguf", "owned_by": "llamacpp", "meta": {"n_vocab": 777}}]},
        "/lora-adapters": [{"id": 0, "path": "/x/a0.gguf", "scale": 1.0}, {"id": 1, "path": "a1.gguf", "scale": 1.0}],
    }
    async with fake_server(exact, pages) as fake:
        found = await discover(fake.url, None)
        words = await find_words(fake.url, None, found.vocab_size, seed=0)
    assert (found.base, found.engine, found.vocab_size) == ("m.gguf", "llamacpp", 777)
    assert found.adapters == ("a0", "a1")
    assert found.adapter_ids == {"a0": 0, "a1": 1}
    assert words == PLAIN_WORDS


def test_help_and_mistakes_need_neither_torch_nor_an_http_client() -> None:
    code = (
        "import sys; from lora_serve.cli import main\n"
        "assert main(['bench', '--speed', '2']) == 2\n"
        "loaded = {'torch', 'aiohttp', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "main(['bench', '--help'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    for flag in ("--spawn", "--rate", "--popularity", "--trace", "exit codes"):
        assert flag in ended.stdout


def test_the_key_does_not_stand_in_the_command_that_is_reported() -> None:
    given = ["--api-key", "secret", "--url", "http://x", "--api-key=secret"]
    assert without_secrets(given) == ["--api-key", "...", "--url", "http://x", "--api-key=..."]
