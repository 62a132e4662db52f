"""`lora-serve demo`: a real server on the bundled model, every tenant's adapter asked at once, the answers shown.

Everything goes over HTTP, as a customer's would; the server is an ordinary `lora-serve serve` child with a
throw-away store. The tenants' questions and the expected answers are package data (`demo_data/prompts.json`), and so
are the tools that are offered to an adapter that calls them (`tools.json`) and what the registrations say of the
adapters' answers (`metadata.json`).
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lora_serve.commands import demo_traffic
from lora_serve.commands.server_process import ServerFailedError, ServerProcess, free_port, is_port_free
from lora_serve.core.errors import ConfigError
from lora_serve.core.flags import FlagParser

DATA = Path(__file__).parents[1] / "demo_data"
BASE = "demo-base"  # the bundled model's name on the wire
CONSOLE = "/ui/#/live"  # without a page's name it would open on the playground, which needs no key
MAX_TOKENS = 64
READY_SECONDS = 120.0
TRIES = 3
WIDE = 1000  # columns when the output is no terminal, so that no line is folded


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt for one adapter; `answer` is what it must say, None where anything will do (the base)."""

    model: str  # adapter id, or the base's name
    prompt: str
    answer: str | None
    has_tools: bool = False  # `answer` is the call of a tool

    @property
    def tenant(self) -> str:
        return self.model.partition("/")[0]


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """The server's answer to one question, with the headers that name the adapter."""

    question: Question
    text: str
    digest: str
    milliseconds: dict[str, float]  # Server-Timing: queue, load, prefill, decode

    @property
    def is_correct(self) -> bool:
        return self.question.answer is None or self.text.strip() == self.question.answer.strip()


class DemoFailedError(Exception):
    """The demo cannot go on; the message says why."""


def run(arguments: list[str]) -> int:
    """Serve, ask, show; stay up until Ctrl-C unless `--once`. 0 if every tenant's answer is right."""
    parser = FlagParser("lora-serve demo", "Serve the bundled model and its tenants' adapters.", {})
    parser.add_argument("--port", default="8000", metavar="N", help="TCP port (default: 8000)")
    parser.add_argument("--once", action="store_true", help="exit after the answers")
    parser.add_argument("--traffic", action="store_true", help="go on asking, gently and endlessly, for the page")
    values = parser.values(arguments)
    port = str(values["port"])
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--port: expected a number from 0 to 65535 (got {port!r})")
    if values["once"] and values["traffic"]:
        raise ConfigError("--traffic: goes on until the server ends, so not together with --once")
    return _main(int(port), bool(values["once"]), bool(values["traffic"]))


def _main(port: int, once: bool, has_traffic: bool) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)
    try:
        with tempfile.TemporaryDirectory(prefix="lora_serve_demo_") as folder:
            return asyncio.run(_run(console, Path(folder), _choose_port(port, once), once, has_traffic))
    except (DemoFailedError, ServerFailedError, aiohttp.ClientError) as error:
        Console(stderr=True, highlight=False).print(
            f"The demo failed: {error}", style="red", markup=False, soft_wrap=True
        )
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def _choose_port(port: int, once: bool) -> int:
    """`port`, or any free one with `once`, when no call comes later."""
    if port and is_port_free(port):
        return port
    if port and not once:
        raise DemoFailedError(f"port {port} is taken; choose another one with --port")
    return free_port()


async def _run(console: Console, folder: Path, port: int, once: bool, has_traffic: bool) -> int:
    _cancel_on_signals()
    questions = first_questions()
    store = folder / "store"
    arguments = demo_arguments(store, adapter_folders()) + (list(demo_traffic.ARGUMENTS) if has_traffic else [])
    with ServerProcess(arguments, folder / "server.log", port) as server:
        console.print(f"The console: {server.url}{CONSOLE}")
        console.print(f"Starting the server on {server.url} with {len(questions)} tenants' adapters ...")
        await asyncio.to_thread(server.wait_until_ready, READY_SECONDS)
        for _ in range(TRIES):  # on a busy machine requests may come so late that none share a forward pass
            answers, most_adapters = await _ask_all(server.url, store, questions, signs=has_traffic)
            if most_adapters > 1:
                break
        show(console, answers, most_adapters)
        _check(answers, most_adapters)
        if once:
            return 0
        traffic = asyncio.create_task(_traffic(server.url, store)) if has_traffic else None
        try:
            if traffic is not None and demo_traffic.ends_at_enter(traffic, sys.stdin):
                console.print("\nThe tenants ask on; Enter ends their traffic alone.")
            return await _stay_up(console, server, questions[:2], store, signs=has_traffic)
        finally:
            if traffic is not None:
                traffic.cancel()


def _cancel_on_signals() -> None:
    """SIGINT and SIGTERM cancel this task, so that every `with` is left and the server child ends first."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called from a task"
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)


def first_questions() -> list[Question]:
    """The first question of each adapter of the package data, in its order."""
    first: dict[str, Question] = {}
    for item in _data("prompts.json"):
        answer = _shown_call(item["call"]) if "call" in item else item["answer"]
        first.setdefault(item["adapter"], Question(item["adapter"], item["prompt"], answer, "call" in item))
    return list(first.values())


def _shown_call(function: dict[str, str]) -> str:
    """`get_weather({"city": "Lisbon"})`, from the name and the JSON text of the arguments."""
    return f"{function['name']}({function['arguments']})"


def _data(name: str) -> Any:
    try:
        return json.loads((DATA / name).read_text())
    except OSError as error:
        raise DemoFailedError(f"the bundled data is missing: {error}") from error


def adapter_folders() -> dict[str, Path]:
    """Adapter id -> its PEFT folder, from `demo_data/adapters/<tenant>/<name>/`."""
    configs = sorted((DATA / "adapters").glob("*/*/adapter_config.json"))
    return {"/".join(config.parent.parts[-2:]): config.parent for config in configs}


def demo_arguments(store: Path, adapters: dict[str, Path]) -> list[str]:
    """Flags of the server child; float32 is the dtype in which the expected answers were measured."""
    arguments = ["--model", str(DATA / "model"), "--served-model-name", BASE, "--dtype", "float32"]
    arguments += ["--store", str(store), "--max-loras", str(max(16, len(adapters)))]
    for name, folder in adapters.items():
        arguments += ["--lora-modules", f"{name}={folder}"]
    return arguments


async def _ask_all(
    url: str, store: Path, questions: Sequence[Question], *, signs: bool
) -> tuple[list[DemoAnswer], int]:
    """One mixed batch: every tenant's question and one for the base model, all at once; `signs`: with the admin's key.

    Returns the answers, the base's last, and the largest number of different adapters that shared a forward pass.
    """
    base = Question(BASE, questions[0].prompt, None)
    admin = {"Authorization": f"Bearer {_admin_key_file(store).read_text().strip()}"}
    async with aiohttp.ClientSession(url, headers=admin if signs else {}, raise_for_status=_raise_in_words) as http:
        for name, metadata in _data("metadata.json").items():
            await http.patch(f"/admin/adapters/{name}", headers=admin, json={"metadata": metadata})
        for question in questions:  # loaded beforehand, so that the times show the mixed batch and not the loading
            await http.post(f"/admin/adapters/{question.model}/prefetch", headers=admin)
        answers = await asyncio.gather(*(_ask(http, question) for question in [*questions, base]))
        engine = await (await http.get("/admin/engine", headers=admin)).json()
    return list(answers), max((batch["num_adapters"] for batch in engine["recent_batches"]), default=0)


async def _raise_in_words(response: aiohttp.ClientResponse) -> None:
    if not response.ok:
        raise DemoFailedError(f"{response.method} {response.url.path}: {response.status} {await response.text()}")


async def _ask(http: aiohttp.ClientSession, question: Question) -> DemoAnswer:
    async with http.post("/v1/chat/completions", json=_body(question) | {"max_tokens": MAX_TOKENS}) as response:
        answer: dict[str, Any] = await response.json()
        message = answer["choices"][0]["message"]
        calls = [_shown_call(call["function"]) for call in message.get("tool_calls") or []]
        text = " ".join(calls) if calls else message["content"]
        digest, timing = (response.headers.get(name, "") for name in ("X-Adapter-Digest", "Server-Timing"))
    return DemoAnswer(question, text, digest, parse_server_timing(timing))


def _body(question: Question) -> dict[str, Any]:
    messages = [{"role": "user", "content": question.prompt}]
    body = {"model": question.model, "messages": messages, "temperature": 0}
    return body | ({"tools": _data("tools.json")} if question.has_tools else {})


def parse_server_timing(header: str) -> dict[str, float]:
    """`queue;dur=0.2, load;dur=0` -> {"queue": 0.2, "load": 0.0}, in ms."""
    return {name: float(duration) for name, duration in re.findall(r"(\w+);dur=([\d.]+)", header)}


def show(console: Console, answers: Sequence[DemoAnswer], most_adapters: int) -> None:
    """The details, the base's answer, the proof of the shared batch, and last the tenants' answers."""
    *tenants, base = answers
    console.print(_details(tenants))
    console.print(f"The base model alone, beside them, asked the first of these: {base.text!r}", markup=False)
    console.print(
        f"Asked at once over HTTP; up to {most_adapters} different adapters shared one forward pass (/admin/engine)."
    )
    console.print(_verdicts(tenants))


def _details(answers: Sequence[DemoAnswer]) -> Table:
    table = Table(box=box.MARKDOWN, show_edge=False, pad_edge=False)
    for name in ("adapter", "digest", "queue ms", "load ms", "prefill ms", "decode ms", "prompt"):
        table.add_column(name, justify="right" if name.endswith("ms") else "left", overflow="fold")
    for answer in answers:
        times = (f"{answer.milliseconds.get(part, 0.0):.1f}" for part in ("queue", "load", "prefill", "decode"))
        table.add_row(answer.question.model, answer.digest[:19], *times, _plain(answer.question.prompt))
    return table


def _verdicts(answers: Sequence[DemoAnswer]) -> Table:
    table = Table(box=box.MARKDOWN, show_edge=False, pad_edge=False)
    for name in ("tenant", "adapter", "answer", "correct"):
        table.add_column(name, overflow="fold")
    for answer in answers:
        correct = "yes" if answer.is_correct else f"NO, expected {_plain(answer.question.answer or '')}"
        table.add_row(answer.question.tenant, answer.question.model, _plain(answer.text), correct)
    return table


def _plain(text: str) -> str:
    """The text on one line, with rich's markup escaped."""
    return escape(re.sub(r"\s+", " ", text).strip())


def _check(answers: Sequence[DemoAnswer], most_adapters: int) -> None:
    wrong = [answer.question.model for answer in answers if not answer.is_correct]
    if wrong:
        raise DemoFailedError(f"wrong answers of {', '.join(wrong)}")
    if most_adapters < 2:  # the mixed batch is what the demo shows
        raise DemoFailedError("no forward pass held rows of two adapters")


async def _stay_up(
    console: Console, server: ServerProcess, examples: Sequence[Question], store: Path, *, signs: bool
) -> int:
    """Print how to call it, then wait for a signal (0) or for the server's own end (an error)."""
    console.print("\nThe server stays up; Ctrl-C ends it. From another terminal:\n")
    key = f' -H "Authorization: Bearer $(cat {_admin_key_file(store)})"' if signs else ""
    for question in examples:
        quoted = json.dumps(_body(question)).replace("'", r"'\''")
        url = f"{server.url}/v1/chat/completions"
        console.print(
            f"curl -s {url}{key} -H 'Content-Type: application/json' -d '{quoted}'\n", markup=False, soft_wrap=True
        )
    console.print(f"The console is at {server.url}{CONSOLE}; sign in with the admin key.", markup=False, soft_wrap=True)
    console.print(f"The admin key is in {_admin_key_file(store)}", markup=False, soft_wrap=True)
    try:
        code = await asyncio.to_thread(server.wait)
    except asyncio.CancelledError:
        console.print("stopping")
        return 0
    raise DemoFailedError(f"the server ended with code {code}; its last words:\n{server.tail()}")


async def _traffic(url: str, store: Path) -> None:
    prompts = demo_traffic.prompts_by_adapter(_data("prompts.json"))
    tenants = sorted({name.partition("/")[0] for name in prompts})
    key = _admin_key_file(store).read_text().strip()
    await demo_traffic.send_traffic(url, key, demo_traffic.Questions(prompts, BASE), tenants)


def _admin_key_file(store: Path) -> Path:
    return store / "admin_key"
