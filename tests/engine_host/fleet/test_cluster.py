"""Words about clusters that are not there, and what Ray's processes are given; no cluster is started."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import signal
import threading
from pathlib import Path

import pytest

from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.engine_host.fleet import cluster, node
from lora_serve.engine_host.fleet.output import drop_bytes_of_grpc, forward_replica_logs, log_batch, log_failure


def config(**given: object) -> FleetConfig:
    values = {"min_replicas": 2, "max_replicas": 2, "num_gpus": 0.0, "num_cpus": 1.5, "address": None, "name": "x"}
    return FleetConfig(**{**values, "wait": 1.0, **given})  # type: ignore[arg-type]


def refused(given: FleetConfig) -> str:
    with pytest.raises(ConfigError) as caught, cluster.open_cluster(given):
        pass
    return str(caught.value)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    words = "pip install 'lora-serve[ray]', in a clone ./scripts/install ray"
    assert refused(config()) == f"--engine ray needs the package ray: {words}"


def test_a_token_is_shown_where_there_is_one(tmp_path: Path) -> None:
    asked = {"RAY_AUTH_MODE": "token"}
    home = {"HOME": str(tmp_path)}
    assert cluster.token_variables(home) == {}
    assert cluster.token_variables({**home, "RAY_AUTH_TOKEN": "t"}) == asked
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    assert cluster.token_variables(home) == asked
    assert cluster.token_variables({**home, "RAY_AUTH_MODE": "disabled"}) == {"RAY_AUTH_MODE": "disabled"}


def test_secrets_of_the_server_do_not_reach_rays_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORA_SERVE_ADMIN_KEY", "LORA_SERVE_REDIS_URL", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    monkeypatch.setenv("LORA_SERVE_KERNELS", "avx2")
    own = node.head_environment({"RAY_AUTH_MODE": "token"})
    assert "a secret" not in {*own.values(), *node.child_environment().values()}
    assert "RAY_ADDRESS" not in own
    assert {own["RAY_USAGE_STATS_ENABLED"], own["RAY_memory_monitor_refresh_ms"]} == {"0"}
    assert (own["LORA_SERVE_KERNELS"], own["RAY_AUTH_MODE"]) == ("avx2", "token")


def test_a_cluster_of_ones_own_listens_on_loopback_and_has_room_for_an_update(tmp_path: Path) -> None:
    flags = node.head_flags(config(), tmp_path)
    assert {"--node-ip-address=127.0.0.1", "--port=0", "--include-dashboard=false", "--num-gpus=0"} <= set(flags)
    assert "--num-cpus=6" in flags  # two replicas of 1.5, and as many beside them
    assert "--num-gpus=0" not in node.head_flags(config(num_gpus=1.0), tmp_path)  # those that Ray finds


def test_objects_are_files_where_shared_memory_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("Usage", (), {"free": 64 * 2**20})
    monkeypatch.setattr(node.shutil, "disk_usage", lambda path: usage)
    assert f"--plasma-directory={tmp_path}" in node.head_flags(config(), tmp_path)
    usage.free = 2**30  # type: ignore[attr-defined]
    assert not [flag for flag in node.head_flags(config(), tmp_path) if flag.startswith("--plasma")]


def test_rays_last_words_are_its_error_or_ours(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert node.last_words(log) == "it said nothing"
    log.write_text("2026-01-01 WARNING ...\nTraceback\n  File x\nRuntimeError: Version mismatch:\n  Ray: 2.10\n")
    assert node.last_words(log) == "RuntimeError: Version mismatch: Ray: 2.10"
    log.write_text("W rpc: InvalidAuthToken: wrong\nW trying again\n")
    assert "RAY_AUTH_TOKEN_PATH" in node.last_words(log)


def test_what_a_library_takes_for_the_console_while_it_connects_leads_nowhere(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's keeps the stream, as other libraries of logs do, and writes errors to it as long as it lives."""
    libc, kept = ctypes.CDLL(None), list[ctypes.c_void_p]()

    def write(stream: ctypes.c_void_p, words: bytes) -> None:
        libc.fputs(words, stream)
        libc.fflush(stream)

    def connect(**flags: object) -> None:
        kept.append(ctypes.c_void_p(ctypes.c_void_p.in_dll(libc, "stderr").value))
        write(kept[0], b"while it connects\n")

    monkeypatch.setattr(importlib.import_module("ray"), "init", connect)
    with cluster._connected(cluster.Cluster("h:1", is_own=False, node=None)):
        write(kept[0], b"later\n")
        write(ctypes.c_void_p.in_dll(libc, "stderr"), b"of others\n")
    assert capfd.readouterr() == ("", "of others\n")


def test_signals_stay_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's library sets a handler in C, about which Python knows nothing."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    ignore = ctypes.create_string_buffer(512)
    ignore[0:1] = b"\x01"  # SIG_IGN
    try:
        with cluster._kept_signals():
            ctypes.CDLL(None).sigaction(signal.SIGTERM, ignore, None)
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_cluster_that_does_not_answer_is_left_behind() -> None:
    answer = threading.Event()
    with pytest.raises(ConfigError, match="the Ray cluster at h:1 did not answer within 0 s"):
        cluster._within(0.05, answer.wait, "h:1")
    answer.set()
    with pytest.raises(ConfigError, match="the Ray cluster at h:1 was not joined: no room"):
        cluster._within(5, lambda: (_ for _ in ()).throw(RuntimeError("no room")), "h:1")


def test_lines_of_replicas_become_records_of_this_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = '{"time": "t", "level": "warning", "logger": "lora_serve.engine", "message": "hot", "slot": 3, "name": "n"}'
    log_batch({"pid": 7, "ip": "10.0.0.5", "lines": [line, "a plain line", line, "", '{"message": 1}']})
    first, second, _, third = caplog.records
    assert (first.name, first.levelno, first.getMessage()) == ("lora_serve.engine", logging.WARNING, "hot")
    assert (vars(first)["slot"], vars(first)["replica_pid"], vars(first)["replica_node"]) == (3, 7, "10.0.0.5")
    assert (first.name, vars(first)["replica_name"]) == ("lora_serve.engine", "n")
    assert (second.levelno, second.getMessage(), vars(second)["replica_pid"]) == (logging.INFO, "a plain line", 7)
    assert third.getMessage() == '{"message": 1}'


def test_plain_lines_in_a_row_are_one_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = '{"level": "warning", "logger": "lora_serve.engine", "message": "hot"}'
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1', "", "ValueError: x"]
    serves = "INFO 2026-11-23 02:50:07,809 controller 9392 -- Adding."
    log_batch({"pid": 7, "ip": "10.0.0.5", "lines": [*trace, line, "after", serves, serves]})
    told = [record.getMessage() for record in caplog.records]
    assert told == ["\n".join(filter(None, trace)), "hot", "after", "Adding.", "Adding."]
    assert vars(caplog.records[0])["replica_pid"] == 7


def test_what_serve_writes_keeps_its_level_and_loses_its_dialect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica, stamp = "Replica(id='k1', deployment='engine', app='mine')", "2026-11-23 02:50:07,809 controller 9392 --"
    lines = [
        f"INFO {stamp} Adding 1 replica to Deployment(name='engine', app='mine').",
        f"WARNING {stamp} Actor for {replica} crashed, marking it unhealthy immediately.",
        f"WARNING {stamp} Replica {replica} failed health check, stopping it.",
        f"ERROR {stamp} The deployments ['engine'] are UNHEALTHY.",
    ]
    log_batch({"pid": 7, "ip": "10.0.0.5", "lines": lines})
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "Adding 1 replica to fleet mine."),
        ("WARNING", "replica k1 crashed, marking it unhealthy immediately."),
        ("WARNING", "replica k1 failed health check, stopping it."),
        ("WARNING", "the fleet has fewer replicas than it should have"),
    ]


def test_what_ray_would_print_past_the_log_is_a_record_of_it(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    died = (
        "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot, "
        "check the logs for the dead worker. Lease ID: 02 Worker ID: f6 Node ID: 8e Worker IP address: 10.0.0.5 "
        "Worker port: 10575 Worker PID: 9542 Worker exit type: SYSTEM_ERROR Worker exit detail: End of file. Some"
    )
    for text in (died, "another\n  thing"):
        log_failure({"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert [record.getMessage() for record in caplog.records] == [
        "process 9542 on 10.0.0.5 died: killed, short of memory, or a crash",
        "another thing",
    ]
    assert capfd.readouterr() == ("", "")


def test_lines_of_rays_own_processes_are_not_the_operators(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_batch({"pid": "raylet", "ip": "10.0.0.5", "lines": ["chatter"]})
    assert caplog.records == []


def test_what_ray_tells_its_drivers_is_a_line_of_the_log_and_not_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = importlib.import_module("ray._private.worker")
    with forward_replica_logs():
        data = {"lines": ["A worker\n  died"], "pid": "raylet", "is_err": False}
        worker.print_to_stdstream(data, ignore_prefix=False)
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [(logging.WARNING, "A worker died")]
    assert capsys.readouterr() == ("", "")


def test_error_that_grpc_cannot_decode_is_not_logged_with_what_lies_behind_it_in_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Seen when a server had no descriptors left: gRPC's own words, then bytes of the heap, then a traceback."""
    drop_bytes_of_grpc()
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.error("Invalid encoding on %s", b"socket: Too many open files\x00\x83W")
    logger.error("another error")
    assert [record.message for record in caplog.records] == ["another error"]
