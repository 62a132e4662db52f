"""`--engine process` as users see it: a real server, its engine in a child that is killed, stopped and left alone."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lora_serve.commands.server_process import ServerProcess
from lora_serve.model.native import levels
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.e2e.processes import PATIENCE, children_of, engine_of, eventually, is_alive, loads_torch, until_replaced
from tests.oracle import save_adapter
from tests.tiers import mostly_nightly

NAMES = ("tiny", "acme/a", "acme/b", "globex/c", "globex/d")
NOTICED = 2.0  # seconds


def flags(site: Site, store: str, *more: str) -> list[str]:
    modules = [f"{name}={folder}" for name, folder in site.adapters.items()]
    return [*site.arguments(store, "--engine", "process", "--warmup", "off", *more), "--lora-modules", *modules]


@pytest.fixture(scope="module")
def hosted(site: Site) -> Iterator[ServerProcess]:
    """Tests may kill its engine, not the server."""
    with ServerProcess(
        flags(site, "process-store", "--engine-max-restarts", "50"), site.root / "process-log"
    ) as process:
        process.wait_until_ready(PATIENCE)
        yield process


def answer(process: ServerProcess, name: str, **fields: Any) -> Any:
    body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "logprobs": 2, **fields}
    reply = call(f"{process.url}/v1/completions", body)
    assert reply.status == 200, reply.text
    choice = reply.json["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], reply.headers["X-Adapter-Digest"]


def kill_engine(process: ServerProcess) -> int:
    engine = engine_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    return engine


def metric(process: ServerProcess, name: str) -> float:
    lines = call(f"{process.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


class Stream(threading.Thread):
    """Reads one long streamed answer; `started` once its first event came."""

    def __init__(self, process: ServerProcess, name: str = "tiny", max_tokens: int = 90) -> None:
        super().__init__(daemon=True)
        self.url = f"{process.url}/v1/completions"
        self.body = {
            "model": name, "prompt": [5], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0,
            "stream": True,
        }  # fmt: skip
        self.events: list[Any] = []
        self.is_done = self.is_cut = False
        self.status = 0
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        request = urllib.request.Request(self.url, json.dumps(self.body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                self.status = response.status
                for line in response:
                    if line.startswith(b"data: [DONE]"):
                        self.is_done = True
                    elif line.startswith(b"data: "):
                        self.events.append(json.loads(line[6:]))
                        self.started.set()
        except urllib.error.HTTPError as error:
            self.status = error.code
            error.close()
        except (OSError, http.client.HTTPException):
            self.is_cut = True
        finally:
            self.started.set()


def test_the_server_has_no_torch_and_the_engine_no_secret(hosted: ServerProcess) -> None:
    engine = engine_of(hosted.pid)
    assert not loads_torch(hosted.pid)
    assert loads_torch(engine)
    from tests.e2e.conftest import KEY

    told = Path(f"/proc/{engine}/environ").read_bytes() + Path(f"/proc/{engine}/cmdline").read_bytes()
    assert KEY.encode() not in told


def test_answers_are_those_of_an_engine_in_a_thread(hosted: ServerProcess, server: ServerProcess) -> None:
    for name in NAMES:
        assert answer(hosted, name) == answer(server, name), name


def test_version_tells_the_kernels_of_the_engines_process(hosted: ServerProcess, server: ServerProcess) -> None:
    kernels = call(f"{hosted.url}/version").json["kernels"]
    assert kernels == call(f"{server.url}/version").json["kernels"]
    assert kernels["level"] in levels.LEVELS
    assert kernels["source"] == "compiled"
    assert f"kernels: {kernels['level']}, compiled here" in hosted.log.read_text()


def test_adapters_registered_while_it_runs_are_served(hosted: ServerProcess, server: ServerProcess, site: Site) -> None:
    dora = save_adapter(site.model, site.root / "dora", seed=9, r=4, lora_alpha=8, use_dora=True)
    bodies = [{"id": "late/dora", "source": str(dora)}, {"id": "late/pissa", "source": str(dora)}]
    for process in (hosted, server):
        for body in bodies:
            reply = call(f"{process.url}/admin/adapters", body, ADMIN)
            assert reply.status in {200, 201}, reply.text
    assert answer(hosted, "late/dora") == answer(server, "late/dora")


def test_a_bad_adapter_is_refused_in_words_and_disturbs_nobody(hosted: ServerProcess, site: Site) -> None:
    folder = site.root / "not-a-number"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((site.adapters["acme/a"] / "adapter_config.json").read_bytes())
    weights = bytearray((site.adapters["acme/a"] / "adapter_model.safetensors").read_bytes())
    weights[-4:] = b"\xff\xff\xff\x7f"  # not a number, as float32
    (folder / "adapter_model.safetensors").write_bytes(weights)
    before = engine_of(hosted.pid)
    reply = call(f"{hosted.url}/admin/adapters", {"id": "bad/one", "source": str(folder)}, ADMIN)
    assert reply.status == 422
    assert "NaN" in reply.json["error"]["message"]
    assert str(site.root) not in reply.text
    assert engine_of(hosted.pid) == before


def test_a_killed_engine_ends_running_streams_in_words_and_comes_back_with_everything(
    hosted: ServerProcess, site: Site
) -> None:
    assert call(f"{hosted.url}/admin/adapters/globex/d/pin", {}, ADMIN).status == 200
    expected = {name: answer(hosted, name) for name in NAMES}
    restarts = metric(hosted, "lora_serve_engine_restarts_total")
    streams = [Stream(hosted, name) for name in ("tiny", "acme/a", "acme/b")]
    for stream in streams:
        assert stream.started.wait(PATIENCE)
    old = kill_engine(hosted)
    killed = time.monotonic()
    for stream in streams:
        stream.join(PATIENCE)
    told = [stream.events[-1] for stream in streams if "error" in stream.events[-1]]
    assert time.monotonic() - killed < NOTICED + 1
    assert all(event["error"]["code"] == "engine_restarted" for event in told)
    assert all(stream.is_done for stream in streams)
    until_replaced(hosted, old)
    assert {name: answer(hosted, name) for name in NAMES} == expected
    assert metric(hosted, "lora_serve_engine_restarts_total") == restarts + 1
    card = call(f"{hosted.url}/admin/adapters/globex/d", headers=ADMIN).json
    assert card["state"] == "on_device"
    assert card["pinned"]


def test_while_there_is_no_engine_the_server_says_when_to_come_again(hosted: ServerProcess) -> None:
    """The new one is stopped as soon as it is there, so that it cannot be ready before all is asked."""
    old = kill_engine(hosted)
    eventually(lambda: children_of(hosted.pid) not in ([], [old]), "no new engine")
    os.kill(new := engine_of(hosted.pid), signal.SIGSTOP)
    eventually(lambda: not hosted.is_ready(), "it was not noticed")
    ready = call(f"{hosted.url}/ready")
    refused = call(f"{hosted.url}/v1/completions", {"model": "tiny", "prompt": [5]})
    listed = call(f"{hosted.url}/v1/models")
    health = call(f"{hosted.url}/health")
    for reply in (ready, refused):
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) >= 1
        assert "restarted" in reply.json["error"]["message"]
    assert (listed.status, health.status) == (200, 200)
    os.kill(new, signal.SIGCONT)
    until_replaced(hosted, old)


@pytest.mark.nightly  # by day: tests/engine_host/test_supervisor.py
def test_a_hung_engine_is_killed_and_replaced(site: Site) -> None:
    arguments = flags(site, "hung-store", "--engine-step-timeout", "1")
    with ServerProcess(arguments, site.root / "hung-log") as process:
        process.wait_until_ready(PATIENCE)
        old = engine_of(process.pid)
        os.kill(old, signal.SIGSTOP)
        stuck = Stream(process)
        stuck.join(PATIENCE)
        assert stuck.status == 503
        until_replaced(process, old)
        assert answer(process, "acme/a")
        assert "no progress" in process.log.read_text()


@pytest.mark.nightly  # by day: tests/client/test_process.py
def test_an_engine_killed_while_it_starts_is_started_again(site: Site) -> None:
    with ServerProcess(flags(site, "start-store"), site.root / "start-log") as process:
        old = kill_engine(process)
        process.wait_until_ready(PATIENCE)
        assert engine_of(process.pid) != old
        assert answer(process, "acme/a")


@pytest.mark.nightly  # by day: tests/engine_host/test_supervisor.py
def test_a_server_that_loses_its_engine_too_often_says_so_and_exits_with_3(site: Site) -> None:
    arguments = flags(site, "lost-store", "--engine-max-restarts", "0")
    with ServerProcess(arguments, site.root / "lost-log") as process:
        process.wait_until_ready(PATIENCE)
        kill_engine(process)
        seen: set[int] = set()
        while process.exit_code is None:
            with suppress(OSError):
                seen.add(call(f"{process.url}/health").status)
            time.sleep(0.02)
        assert process.exit_code == 3
        assert 503 in seen
        assert "lost for good" in process.log.read_text()


@pytest.mark.nightly  # by day: tests/faults/test_process_faults.py
def test_a_killed_server_leaves_no_engine(site: Site) -> None:
    with ServerProcess(flags(site, "orphan-store"), site.root / "orphan-log") as process:
        process.wait_until_ready(PATIENCE)
        engine = engine_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        eventually(lambda: not is_alive(engine), "the engine outlives its server")


@pytest.mark.parametrize("engine", mostly_nightly(["thread", "process"], "process"))
def test_sigterm_lets_two_hundred_streams_end_uncut(site: Site, engine: str) -> None:
    arguments = [
        *site.arguments(f"drain-{engine}", "--engine", engine, "--warmup", "off", "--max-num-seqs", "256"),
        "--max-num-batched-tokens", "512", "--kv-cache-memory", "64MiB", "--shutdown-timeout", "100",
    ]  # fmt: skip
    with ServerProcess(arguments, site.root / f"drain-{engine}-log") as process:
        process.wait_until_ready(PATIENCE)
        children = [engine_of(process.pid)] if engine == "process" else []
        streams = [Stream(process) for _ in range(200)]
        for stream in streams:
            assert stream.started.wait(PATIENCE)
        os.kill(process.pid, signal.SIGTERM)
        eventually(lambda: not process.is_ready(), "it takes no notice")
        with suppress(OSError):  # it may have ended: a port that is closed refuses as well
            reply = call(f"{process.url}/v1/completions", {"model": "tiny", "prompt": [5]})
            assert reply.status == 503
            assert int(reply.headers["Retry-After"]) >= 1
        for stream in streams:
            stream.join(PATIENCE)
        assert process.wait() == 0
    assert [stream.status for stream in streams] == [200] * 200
    assert all(stream.is_done for stream in streams)
    assert {stream.events[-1]["choices"][0]["finish_reason"] for stream in streams} == {"length"}
    assert not any(is_alive(child) for child in children)


@contextmanager
def busy(site: Site, engine: str, name: str, *flags: str) -> Iterator[tuple[ServerProcess, list[int], list[Stream]]]:
    """A server, its engine's process if it has one, and forty streams that run one after the other."""
    store = f"{name}-{engine}"
    arguments = [*site.arguments(store, "--engine", engine, "--warmup", "off"), "--max-num-seqs", "1", *flags]
    with ServerProcess(arguments, site.root / f"{store}-log") as process:
        process.wait_until_ready(PATIENCE)
        children = [engine_of(process.pid)] if engine == "process" else []
        streams = [Stream(process) for _ in range(40)]
        eventually(lambda: any(stream.events for stream in streams), "nothing runs")
        yield process, children, streams


@pytest.mark.parametrize("engine", mostly_nightly(["thread", "process"], "process"))
def test_a_drain_that_runs_out_of_time_is_seen_in_the_exit_code(site: Site, engine: str) -> None:
    with busy(site, engine, "cut", "--shutdown-timeout", "0.1") as (process, children, streams):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 4
        assert "did not end in time" in process.log.read_text()
    for stream in streams:
        stream.join(PATIENCE)
    told = [stream for stream in streams if stream.status == 503 or (stream.events and "error" in stream.events[-1])]
    assert told, "those that were cut were told so"
    assert not any(is_alive(child) for child in children)


@pytest.mark.parametrize("engine", mostly_nightly(["thread", "process"], "process"))
def test_a_second_sigterm_ends_it_at_once(site: Site, engine: str) -> None:
    with busy(site, engine, "twice", "--shutdown-timeout", "1000") as (process, children, streams):
        os.kill(process.pid, signal.SIGTERM)
        eventually(lambda: not process.is_ready(), "it takes no notice")
        assert process.exit_code is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 1
        eventually(lambda: not any(map(is_alive, children)), "the engine outlives its server")
        for stream in streams:
            stream.join(PATIENCE)
        assert any(stream.is_cut for stream in streams)
