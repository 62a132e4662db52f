"""Addresses of Ray clusters: which one is meant, and what is said where none answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from lora_serve.core.errors import ConfigError
from lora_serve.engine_host.fleet import cluster


@contextmanager
def grpc_service(*services: gcs_service_pb2_grpc.NodeInfoGcsServiceServicer) -> Iterator[str]:
    """The address of a server with these services."""
    server = grpc.server(ThreadPoolExecutor(1))
    for service in services:
        gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class Gcs(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):  # type: ignore[misc]  # Any to mypy
    """The one answer that counts, in Ray's own words of its service."""

    def __init__(self, status: grpc.StatusCode | None) -> None:
        self.status = status

    def GetClusterId(self, request: object, context: grpc.ServicerContext) -> gcs_service_pb2.GetClusterIdReply:  # noqa: N802
        if self.status is not None:
            context.abort(self.status, "no")
        return gcs_service_pb2.GetClusterIdReply(cluster_id=b"c")


@contextmanager
def listener(*, closes: bool = False) -> Iterator[str]:
    """Somebody who says nothing, or leaves."""
    with socket.socket() as opened, ThreadPoolExecutor(1) as pool:
        opened.bind(("127.0.0.1", 0))
        opened.listen()

        def hang_up() -> None:
            opened.accept()[0].close()  # the look whether the port is open
            connection = opened.accept()[0]
            connection.sendall(b"-ERR unknown command\r\n")
            connection.close()

        if closes:
            pool.submit(hang_up)
        yield f"127.0.0.1:{opened.getsockname()[1]}"


def refused(asked: str) -> tuple[str, float]:
    """The words, and the seconds that they took."""
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        cluster.check_reachable(asked)
    return str(caught.value), time.monotonic() - start


def test_nobody_at_the_address_is_said_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        asked = f"127.0.0.1:{free.getsockname()[1]}"
        words, seconds = refused(asked)
    assert words.startswith(f"--ray-address {asked}: no Ray cluster can be reached there (Connection refused)")
    assert seconds < 5


@pytest.mark.parametrize(("closes", "reason"), [(False, "it does not answer"), (True, "it speaks another protocol")])
def test_a_listener_that_is_no_ray_is_said_in_time(closes: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.3)
    with listener(closes=closes) as asked:
        words, seconds = refused(asked)
    assert words.startswith(f"--ray-address {asked}: what listens there is no Ray cluster ({reason}")
    assert "the port of its GCS" in words
    assert seconds < 5


def test_another_service_of_ray_or_of_anybody_is_no_gcs() -> None:
    with grpc_service() as asked:
        assert "is no Ray cluster (it is another gRPC service)" in refused(asked)[0]


@pytest.mark.parametrize("status", [None, grpc.StatusCode.UNAUTHENTICATED])
def test_a_gcs_answers_or_asks_for_a_token(status: grpc.StatusCode | None) -> None:
    with grpc_service(Gcs(status)) as asked:
        cluster.check_reachable(asked)


def test_auto_without_a_node_here_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "CURRENT_CLUSTER", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^--ray-address auto: no Ray runs on this machine"):
        cluster.running_address()


def test_auto_is_what_ray_start_noted_unless_the_environment_says_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "noted").write_text("10.0.0.5:6379\n")
    monkeypatch.setattr(cluster, "CURRENT_CLUSTER", tmp_path / "noted")
    assert cluster.running_address() == "10.0.0.5:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.6:6379")
    assert cluster.running_address() == "10.0.0.6:6379"
