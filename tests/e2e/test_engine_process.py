"""`--engine process` as users see it: a real server, its engine in a child that is killed, stopped and left alone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.answers import NAMES, answer, metric
from tests.e2e.conftest import ADMIN, KEY, Site
from tests.e2e.plain_http import call
from tests.e2e.processes import PATIENCE, children_of, engine_of, eventually, is_alive, loads_torch, until_replaced
from tests.e2e.streams import Stream

pytestmark = pytest.mark.engines("process", alone="the engine's process is killed, stopped or looked into")
NOTICED = 2.0  # seconds


def kill_engine(process: ServerProcess) -> int:
    engine = engine_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    return engine


def test_the_server_has_no_torch_and_the_engine_no_secret(server: ServerProcess) -> None:
    engine = engine_of(server.pid)
    assert not loads_torch(server.pid)
    assert loads_torch(engine)
    told = Path(f"/proc/{engine}/environ").read_bytes() + Path(f"/proc/{engine}/cmdline").read_bytes()
    assert KEY.encode() not in told


def test_a_bad_adapter_is_refused_in_words_and_disturbs_nobody(server: ServerProcess, site: Site) -> None:
    folder = site.root / "not-a-number"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((site.adapters["acme/a"] / "adapter_config.json").read_bytes())
    weights = bytearray((site.adapters["acme/a"] / "adapter_model.safetensors").read_bytes())
    weights[-4:] = b"\xff\xff\xff\x7f"  # not a number, as float32
    (folder / "adapter_model.safetensors").write_bytes(weights)
    before = engine_of(server.pid)
    reply = call(f"{server.url}/admin/adapters", {"id": "bad/one", "source": str(folder)}, ADMIN)
    assert reply.status == 422
    assert "NaN" in reply.json["error"]["message"]
    assert str(site.root) not in reply.text
    assert engine_of(server.pid) == before


def test_a_killed_engine_ends_running_streams_in_words_and_comes_back_with_everything(
    server: ServerProcess, site: Site
) -> None:
    assert call(f"{server.url}/admin/adapters/globex/d/pin", {}, ADMIN).status == 200
    expected = {name: answer(server, name) for name in NAMES}
    restarts = metric(server, "lora_serve_engine_restarts_total")
    streams = [Stream(server, name) for name in ("tiny", "acme/a", "acme/b")]
    for stream in streams:
        assert stream.started.wait(PATIENCE)
    old = kill_engine(server)
    killed = time.monotonic()
    for stream in streams:
        stream.join(PATIENCE)
    told = [stream.events[-1] for stream in streams if "error" in stream.events[-1]]
    assert time.monotonic() - killed < NOTICED + 1
    assert all(event["error"]["code"] == "engine_restarted" for event in told)
    assert all(stream.is_done for stream in streams)
    until_replaced(server, old)
    assert {name: answer(server, name) for name in NAMES} == expected
    assert metric(server, "lora_serve_engine_restarts_total") == restarts + 1
    card = call(f"{server.url}/admin/adapters/globex/d", headers=ADMIN).json
    assert card["state"] == "on_device"
    assert card["pinned"]


@pytest.mark.nightly
def test_while_there_is_no_engine_the_server_says_when_to_come_again(server: ServerProcess) -> None:
    """The new one is stopped as soon as it is there, so that it cannot be ready before all is asked."""
    old = kill_engine(server)
    eventually(lambda: children_of(server.pid) not in ([], [old]), "no new engine")
    os.kill(new := engine_of(server.pid), signal.SIGSTOP)
    eventually(lambda: not server.is_ready(), "it was not noticed")
    ready = call(f"{server.url}/ready")
    refused = call(f"{server.url}/v1/completions", {"model": "tiny", "prompt": [5]})
    listed = call(f"{server.url}/v1/models")
    health = call(f"{server.url}/health")
    for reply in (ready, refused):
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) >= 1
        assert "restarted" in reply.json["error"]["message"]
    assert (listed.status, health.status) == (200, 200)
    os.kill(new, signal.SIGCONT)
    until_replaced(server, old)


@pytest.mark.nightly  # by day: tests/engine_host/test_supervisor.py
def test_a_hung_engine_is_killed_and_replaced(site: Site) -> None:
    with site.serving("hung", "--warmup", "off", "--engine-step-timeout", "1", *site.modules()) as process:
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
    arguments = site.arguments("start", "--engine", "process", "--warmup", "off", *site.modules())
    with ServerProcess(arguments, site.log("start")) as process:
        old = kill_engine(process)
        process.wait_until_ready(PATIENCE)
        assert engine_of(process.pid) != old
        assert answer(process, "acme/a")


@pytest.mark.nightly  # by day: tests/engine_host/test_supervisor.py
def test_a_server_that_loses_its_engine_too_often_says_so_and_exits_with_3(site: Site) -> None:
    with site.serving("lost", "--warmup", "off", "--engine-max-restarts", "0") as process:
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
    with site.serving("orphan", "--warmup", "off") as process:
        engine = engine_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        eventually(lambda: not is_alive(engine), "the engine outlives its server")
