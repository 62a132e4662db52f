"""Whoever can connect cannot fill the log: no tracebacks for what clients do, and few lines for what they repeat."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lora_serve.commands.server_process import HOST, ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.e2e.processes import eventually
from tests.tiers import mostly_nightly

pytestmark = pytest.mark.timeout(300)

MAX_DESCRIPTORS = 320  # of the server
FLOOD_SECONDS = 3.0
JUNK = b"this is no gzip" * 20
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(JUNK)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(JUNK), JUNK)

DOINGS = {
    "junk_gzip": POST + LENGTH + b"Content-Encoding: gzip\r\n\r\n" + JUNK,
    "junk_deflate": POST + LENGTH + b"Content-Encoding: deflate\r\n\r\n" + JUNK,
    "junk_brotli": POST + LENGTH + b"Content-Encoding: br\r\n\r\n" + JUNK,
    "junk_zstd": POST + LENGTH + b"Content-Encoding: zstd\r\n\r\n" + JUNK,
    "junk_gzip_chunked": POST + CHUNKED + b"Content-Encoding: gzip\r\n\r\n" + CHUNK + b"0\r\n\r\n",
    "broken_second_chunk": POST + CHUNKED + b"\r\n" + CHUNK + b"zz\r\n",
    "half_a_body": POST + LENGTH + b"\r\n" + JUNK[:20],
    "half_gzip": POST + LENGTH + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x00",
    "junk_behind": POST + LENGTH + b"\r\n" + JUNK + b"\x00\xff" * 100 + b"\r\n\r\n",
    "junk_upload": b"PUT /admin/adapters/a HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    + LENGTH
    + b"Content-Encoding: gzip\r\n\r\n"
    + JUNK,
}  # fmt: skip


CLIENTS_KEY = "key-of-all-clients"


@pytest.fixture(scope="module")
def guarded(site: Site) -> Iterator[ServerProcess]:
    """Wants keys, as one of its flags of vLLM's says, and may open few files."""
    vllm = ["--enable-lora", "--uvicorn-log-level", "info", "--tensor-parallel-size", "1", "--api-key", CLIENTS_KEY]
    wrapper = ["/bin/sh", "-c", f'ulimit -n {MAX_DESCRIPTORS}; exec "$0" "$@"']
    flags = "--warmup", "off", *vllm, "--keep-alive-timeout", "600"
    with site.serving("guarded", *flags, wrapper=wrapper) as process:
        yield process


def test_clients_key_of_vllms_flag_opens_the_models_alone(guarded: ServerProcess) -> None:
    key, body = {"Authorization": f"Bearer {CLIENTS_KEY}"}, {"prompt": "x", "max_tokens": 1}
    assert call(f"{guarded.url}/v1/models", headers=key).status == 200
    assert call(f"{guarded.url}/v1/completions", body, headers=key).status == 200
    assert call(f"{guarded.url}/v1/completions", body).status == 401
    assert call(f"{guarded.url}/admin/adapters", headers=key).status == 403
    said = guarded.log.read_text()
    assert "--enable-lora means nothing here: always on" in said
    assert "--uvicorn-log-level means nothing here" in said
    assert CLIENTS_KEY not in said


def logged_by(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode()


def send(process: ServerProcess, data: bytes, *, resets: bool) -> None:
    """The head, what follows it once the answer to the head is there (if one comes), and then: leave, some rudely."""
    head, ends, body = data.partition(b"\r\n\r\n")
    with socket.create_connection((HOST, process.port), timeout=0.005) as connection, suppress(ConnectionError):
        connection.sendall(head + ends)
        with suppress(TimeoutError):
            connection.recv(2**16)
        connection.settimeout(20)
        connection.sendall(body)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        with suppress(OSError):  # the server may have left
            connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**16):
            pass


@pytest.mark.many(8)
@pytest.mark.parametrize("with_key", [False, True], ids=["no_key", "key"])
@pytest.mark.parametrize("name", DOINGS)
@pytest.mark.parametrize("num_requests", mostly_nightly([10, 50], 10))
def test_no_traceback_is_logged_for_what_a_client_does(
    guarded: ServerProcess, name: str, with_key: bool, num_requests: int
) -> None:
    data = DOINGS[name]
    if with_key:
        line = f"Authorization: {ADMIN['Authorization']}\r\nHost: x\r\n".encode()
        data = data.replace(b"Host: x\r\n", line)
    start = guarded.log.stat().st_size
    for number in range(num_requests):
        send(guarded, data, resets=number % 5 == 4)
    assert guarded.is_ready()
    said = logged_by(guarded.log, start)
    assert "Traceback" not in said, said[:3000]
    assert " 500 " not in said
    assert len(said) < num_requests * 600


def test_end_of_the_descriptors_floods_no_log_and_is_survived(guarded: ServerProcess) -> None:
    start, clients = guarded.log.stat().st_size, list[socket.socket]()
    ended = time.monotonic() + FLOOD_SECONDS
    try:
        while time.monotonic() < ended:
            clients.append(client := socket.socket())
            client.setblocking(False)
            client.connect_ex((HOST, guarded.port))
            if len(clients) >= 2 * MAX_DESCRIPTORS:
                clients.pop(0).close()
                time.sleep(0.001)
    finally:
        for client in clients:
            client.close()
    eventually(guarded.is_ready, "it does not serve again")
    said = logged_by(guarded.log, start)
    assert "Traceback" not in said
    assert len(said) < 50_000
    assert call(f"{guarded.url}/v1/models", headers=ADMIN).status == 200
