"""Children of a side by side: their readiness, their end, what they use."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.processes import Child, cpu_seconds, environment_of, group_is_running, peak_rss, tree
from benchmarks.peers.seam import PeerError
from benchmarks.peers.worker import WorkerEngine, start_worker
from benchmarks.workload import Job, Load
from lora_serve.commands.server_process import free_port

PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0); print('up'); input()"
SERVER = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]))"
WORKER = """
import sys
from benchmarks.peers.worker import answer_lines
def work(jobs, load):
    if load["seed"] == 1:
        sys.exit("no more memory")
    for job in jobs:
        yield {"first_token": 0.5, "gaps": [0.1] * (len(job["prompt"]) - 1), "token_ids": job["prompt"]}
answer_lines(sys.stdin, work)
"""


def child(code: str, tmp_path: Path, *arguments: str, **pipes: int) -> Child:
    return Child([sys.executable, "-c", code, *arguments], tmp_path / "log", environment_of(1), **pipes)


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    started = child("raise SystemExit('no such model')", tmp_path)
    with pytest.raises(PeerError, match=r"did not start \(exit code 1\): no such model"):
        started.wait_until_answers(free_port(), "/health")


def test_a_server_that_is_never_ready_is_ended_and_reported(tmp_path: Path) -> None:
    started = child(PARENT, tmp_path, stdin=subprocess.PIPE)
    with pytest.raises(PeerError, match="not ready in"):
        started.wait_until_answers(free_port(), "/health", timeout=0.3)
    assert started.process.returncode is not None


def test_readiness_is_timed_from_the_start_of_the_process(tmp_path: Path) -> None:
    port = free_port()
    started = child(SERVER, tmp_path, str(port))
    try:
        assert 0 < started.wait_until_answers(port, "/") < 60
    finally:
        started.stop()


def test_stopping_ends_the_whole_group_and_may_be_repeated(tmp_path: Path) -> None:
    started = child(PARENT, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.process.stdout is not None
    assert started.process.stdout.readline() == b"up\n"
    processes = tree(started.pid)
    assert len(processes) == 2
    while peak_rss(processes[1]) <= 2**20:  # its program is not loaded yet
        time.sleep(0.01)
    assert peak_rss(started.pid) > peak_rss(processes[1])
    assert cpu_seconds(started.pid) >= 0
    assert group_is_running(started.pid)
    started.stop()
    assert not group_is_running(started.pid)
    started.stop()


@pytest.fixture
def worker(tmp_path: Path) -> WorkerEngine:
    return start_worker([sys.executable, "-c", WORKER], tmp_path / "log", 1)


def test_a_worker_answers_each_load_and_short_answers_have_failed(worker: WorkerEngine) -> None:
    load = Load(output_tokens=2)
    try:
        found = worker.run([Job((5, 6), None), Job((7, 8, 9), None), Job((8, 9), "a")], load)
        assert [sample.index for sample in found.samples] == [0, 2]
        assert found.num_failed == 1
        assert worker.run([Job((5, 6), None)], load).samples[0].token_ids == (5, 6)
    finally:
        worker.stop()


def test_a_worker_that_ends_under_load_is_reported(worker: WorkerEngine) -> None:
    with pytest.raises(PeerError, match=r"ended \(exit code 1\): no more memory"):
        worker.run([Job((5, 6), None)], Load(seed=1))


def test_a_worker_that_cannot_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="No module named 'absent_module'"):
        start_worker([sys.executable, "-c", "import absent_module"], tmp_path / "log", 1)
