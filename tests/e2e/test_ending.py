"""A server that was told to stop lets its streams end, and ends in time, whatever hangs meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.e2e.processes import PATIENCE, children_of, engine_of, eventually, is_alive
from tests.e2e.streams import Stream, View

pytestmark = pytest.mark.timeout(600)
FAREWELL = ("bye", {"reason": "The server is shutting down."})  # of a live view


def exit_code(process: ServerProcess) -> int:
    """SIGTERM, once."""
    os.kill(process.pid, signal.SIGTERM)
    eventually(lambda: process.exit_code is not None, f"it does not end:\n{process.tail()}")
    return process.wait()


@pytest.mark.engines("process", alone="the engine's process is stopped")
@pytest.mark.nightly  # 15 s of waiting; by day: tests/client/test_process.py
def test_hung_engine_holds_up_no_end(site: Site) -> None:
    with site.serving("hung-end", "--shutdown-timeout", "1") as process:
        engine = engine_of(process.pid)
        os.kill(engine, signal.SIGSTOP)
        assert exit_code(process) == 0
        eventually(lambda: not is_alive(engine), "the engine outlives its server")


HANGING = """
import os, threading

MARK = os.environ["HANG_WHILE_THERE_IS"]
plain = os.open

def hanging(path, *arguments, **options):
    if "/blobs/" in os.fsdecode(path) and os.path.exists(MARK):
        threading.Event().wait()
    return plain(path, *arguments, **options)

os.open = hanging
"""


@pytest.fixture
def hang_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on whoever opens a stored file waits for ever, as on a network disk that is gone."""
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    monkeypatch.setenv("HANG_WHILE_THERE_IS", str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return (tmp_path / "mark").touch


@pytest.mark.engines("process", nightly=["thread"], alone="the engine's file system is made to hang")
def test_load_that_hangs_holds_up_no_end(site: Site, hang_loads: Callable[[], None]) -> None:
    module = f"acme/a={site.adapters['acme/a']}"
    with site.serving("load", "--shutdown-timeout", "1", "--lora-modules", module) as process:
        assert call(f"{process.url}/admin/adapters/acme/a/evict", {}, ADMIN).status == 200
        hang_loads()
        body = {"model": "acme/a", "prompt": [5], "timeout_ms": 300}
        assert call(f"{process.url}/v1/completions", body).status in {408, 504}
        assert exit_code(process) == 0


@pytest.mark.engines("process", nightly=["thread"])
def test_sigterm_lets_two_hundred_streams_end_uncut(site: Site) -> None:
    flags = [
        "--max-num-seqs", "256", "--max-num-batched-tokens", "512", "--kv-cache-memory", "64MiB",
        "--shutdown-timeout", "100",
    ]  # fmt: skip
    with site.serving("drain", "--warmup", "off", *flags) as process:
        children = children_of(process.pid)
        streams = [Stream(process) for _ in range(200)]
        views = [View(process, ADMIN) for _ in range(3)]
        for reader in (*streams, *views):
            assert reader.started.wait(PATIENCE)
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
    for view in views:
        view.join(PATIENCE)
        assert view.events[-1] == FAREWELL


@contextmanager
def busy(site: Site, name: str, *flags: str) -> Iterator[tuple[ServerProcess, list[int], list[Stream]]]:
    """A server, the processes that it started, and streams that run one after the other, a token at a time, for seconds
    on any machine: guessed tokens would make them six steps each.
    """
    with site.serving(name, "--warmup", "off", "--max-num-seqs", "1", "--speculate", "off", *flags) as process:
        children = children_of(process.pid)
        streams = [Stream(process) for _ in range(120)]
        eventually(lambda: any(stream.events for stream in streams), "nothing runs")
        yield process, children, streams


@pytest.mark.nightly
@pytest.mark.engines("process", nightly=["thread"])
def test_a_drain_that_runs_out_of_time_is_seen_in_the_exit_code(site: Site) -> None:
    with busy(site, "cut", "--shutdown-timeout", "0.1") as (process, children, streams):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 4
        assert "did not end in time" in process.log.read_text()
    for stream in streams:
        stream.join(PATIENCE)
    told = [stream for stream in streams if stream.status == 503 or (stream.events and "error" in stream.events[-1])]
    assert told, "those that were cut were told so"
    assert not any(is_alive(child) for child in children)


@pytest.mark.nightly
@pytest.mark.engines("process", nightly=["thread"])
def test_live_views_end_with_the_first_sigterm_and_everything_with_the_second(site: Site) -> None:
    with busy(site, "twice", "--shutdown-timeout", "1000") as (process, children, streams):
        view = View(process, ADMIN)
        assert view.started.wait(PATIENCE)
        os.kill(process.pid, signal.SIGTERM)
        eventually(lambda: not process.is_ready(), "it takes no notice")
        noticed = time.monotonic()
        view.join(PATIENCE)
        seconds, done = time.monotonic() - noticed, [stream for stream in streams if not stream.is_alive()]
        assert view.events[-1] == FAREWELL
        assert process.exit_code is None
        told = [(stream.status, stream.is_done, stream.is_cut, len(stream.events)) for stream in streams]
        assert len(done) < len(streams), f"the view waited {seconds:.1f} s for the streams: {told}\n{process.tail()}"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 1
        eventually(lambda: not any(map(is_alive, children)), "the engine outlives its server")
        for stream in streams:
            stream.join(PATIENCE)
        assert any(stream.is_cut for stream in streams)
