"""A server on CUDA over real sockets: tenants at once, more adapters than slots, and PEFT's own log-probabilities."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.plain_http import call
from tests.e2e.processes import engine_of, until_replaced
from tests.oracle import load_peft, logprobs_with_peft
from tests.tiny_site import save_site

pytestmark = pytest.mark.gpu
ADMIN = {"Authorization": "Bearer admin-key-of-the-tests"}
NAMES = ("acme/a", "acme/b", "globex/c", "globex/d", "late/e")
NUM_REQUESTS, MAX_TOKENS, SECONDS = 60, 12, 180


@dataclass(frozen=True)
class Site:
    """Files that a server needs, and what PEFT makes of them."""

    model: Path
    adapters: dict[str, Path]
    root: Path
    peft: Any


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    root = tmp_path_factory.mktemp("site")
    model, adapters = save_site(root, NAMES)
    oracle = load_peft(model, {name.replace("/", "-"): folder for name, folder in adapters.items()})
    return Site(model, adapters, root, oracle)


@pytest.fixture(scope="module", params=["thread", "process"])
def server(site: Site, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    arguments = [
        "--model", str(site.model), "--served-model-name", "tiny", "--admin-key", ADMIN["Authorization"].split()[1],
        "--store", str(site.root / f"store-{request.param}"), "--adapter-root", str(site.root),
        "--device", "cuda", "--dtype", "float32", "--engine", request.param, "--max-loras", "2",
        "--kv-cache-memory", "8MiB", "--swap-space", "1MiB",
        "--lora-modules", *(f"{name}={site.adapters[name]}" for name in NAMES[:-1]),
    ]  # fmt: skip
    with ServerProcess(arguments, site.root / f"{request.param}.log") as process:
        process.wait_until_ready(SECONDS)
        yield process


def asked(server: ServerProcess, name: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The new tokens' ids and their log-probabilities."""
    body = {
        "model": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip
    reply = call(f"{server.url}/v1/completions", body)
    assert reply.status == 200, reply.text
    choice = reply.json["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def agrees_with_peft(site: Site, name: str, prompt: list[int], found: tuple[list[int], list[float]]) -> bool:
    token_ids, logprobs = found
    adapter = None if name == "tiny" else name.replace("/", "-")
    wanted = logprobs_with_peft(site.peft, adapter, [*prompt, *token_ids])[len(prompt) - 1 : -1]
    likely = wanted.max(dim=-1).values
    own = [float(row[token]) for row, token in zip(wanted, token_ids, strict=True)]
    return bool(token_ids) and all(
        abs(one - logprob) < 2e-3 and best - one < 2e-3
        for one, logprob, best in zip(own, logprobs, likely.tolist(), strict=True)
    )


def test_answers_of_tenants_at_once_are_pefts(server: ServerProcess, site: Site) -> None:
    names = ("tiny", *NAMES[:-1])
    requests = [(names[i % len(names)], [5 + i % 7, 6, *range(10, 12 + i % 23)]) for i in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda one: asked(server, *one), requests))
    wrong = [one for one, answer in zip(requests, found, strict=True) if not agrees_with_peft(site, *one, answer)]
    assert not wrong
    other = agrees_with_peft(site, "acme/b", requests[1][1], found[1])  # acme/a's answer: the comparison can fail
    assert not other


def test_an_adapter_comes_goes_and_comes_back_while_others_are_served(server: ServerProcess, site: Site) -> None:
    late, prompt = NAMES[-1], [9, 8, 7]
    for _ in range(3):
        reply = call(f"{server.url}/admin/adapters", {"id": late, "source": str(site.adapters[late])}, ADMIN)
        assert reply.status in (200, 201), reply.text
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda name: (name, asked(server, name, prompt)), NAMES * 4))
        assert all(agrees_with_peft(site, name, prompt, answer) for name, answer in found)
        assert call(f"{server.url}/admin/adapters/{late}", headers=ADMIN, method="DELETE").status in (200, 204)
        assert call(f"{server.url}/v1/completions", {"model": late, "prompt": prompt}).status == 404


@pytest.mark.parametrize("server", ["process"], indirect=True)
def test_a_killed_engine_comes_back_on_the_device(server: ServerProcess, site: Site) -> None:
    engine = engine_of(server.pid)
    os.kill(engine, signal.SIGKILL)
    until_replaced(server, engine)
    prompt = [4, 4, 9]
    assert agrees_with_peft(site, "globex/d", prompt, asked(server, "globex/d", prompt))
