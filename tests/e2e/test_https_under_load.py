"""Certificates renewed under sixteen clients' streams: nothing is cut, and who comes next sees the new ones."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import ssl
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trustme

from lora_serve.commands.server_process import HOST
from tests.certificates import make_certificate
from tests.e2e.conftest import Site
from tests.e2e.https_server import HttpsServer
from tests.e2e.processes import eventually

NUM_CLIENTS, NUM_RENEWALS = 16, 8
BODY = json.dumps(
    {"model": "tiny", "prompt": [5], "max_tokens": 80, "ignore_eos": True, "temperature": 0, "stream": True}
)


class Client(threading.Thread):
    """Reads one stream after the other over the one connection that it opens."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(daemon=True)
        self.texts: list[str] = []
        self.cut: Exception | None = None
        self.is_over = threading.Event()
        self._connection = http.client.HTTPSConnection(HOST, port, context=context, timeout=60)
        self._connection.connect()
        self._connection.auto_open = 0
        self.start()

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                self._connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
                text = self._connection.getresponse().read().decode()
                assert text.endswith("data: [DONE]\n\n")
                pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                self.texts.append("".join(piece["choices"][0]["text"] for piece in pieces))
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.cut = error
        finally:
            self._connection.close()


def shown_to(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection sees. Raises OSError if it is not let in."""
    connection = http.client.HTTPSConnection(HOST, port, context=context, timeout=30)
    try:
        connection.request("GET", "/health")
        assert connection.sock is not None
        shown: bytes = connection.sock.getpeercert(binary_form=True)
        assert connection.getresponse().status == 200
        return shown
    finally:
        connection.close()


@pytest.mark.nightly
def test_certificates_are_renewed_under_sixteen_streams_and_none_is_cut(site: Site, tmp_path: Path) -> None:
    files, old = make_certificate(tmp_path / "tls"), trustme.CA()
    authorities = tmp_path / "clients.pem"
    old.cert_pem.write_to_path(authorities)

    def known_to(authority: trustme.CA) -> ssl.SSLContext:
        context = files.client_context()
        authority.issue_cert("client@example.org").configure_cert(context)
        return context

    ours = known_to(old)
    flags = ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
    flags += ["--ssl-ca-certs", str(authorities), "--ssl-cert-reqs", "2", "--max-num-seqs", "16"]
    make = partial(HttpsServer, ours)
    with site.host.serving(site.arguments("https-load", *flags), tmp_path / "log", make=make) as server:
        clients = [Client(server.port, ours) for _ in range(NUM_CLIENTS)]

        def progress() -> None:
            """Until every client has read two more streams."""
            wanted = [len(client.texts) + 2 for client in clients]
            eventually(
                lambda: all(c.cut or len(c.texts) >= number for c, number in zip(clients, wanted, strict=True)),
                "the streams stand still",
            )

        def renew(words: str, change: Callable[[], object]) -> None:
            before = server.log.read_text().count(words)
            change()
            os.kill(server.pid, signal.SIGHUP)
            eventually(lambda: server.log.read_text().count(words) > before, words)
            progress()

        seen = [shown_to(server.port, ours)]
        for _ in range(NUM_RENEWALS):
            renew("read anew", lambda: make_certificate(tmp_path / "tls", authority=files.authority))
            seen.append(shown_to(server.port, ours))
        assert len(set(seen)) == NUM_RENEWALS + 1

        renew("stays as it was", lambda: shutil.copyfile(make_certificate(tmp_path / "other").key, files.key))
        assert shown_to(server.port, ours) == seen[-1]

        new = trustme.CA()
        shutil.copyfile(tmp_path / "tls" / "both.pem", files.key)
        renew("read anew", lambda: new.cert_pem.write_to_path(authorities))
        assert shown_to(server.port, known_to(new)) == seen[-1]
        with pytest.raises((OSError, http.client.HTTPException)):
            shown_to(server.port, known_to(old))

        progress()
        for client in clients:
            client.is_over.set()
        for client in clients:
            client.join()
        assert [client.cut for client in clients] == [None] * NUM_CLIENTS
        assert len({text for client in clients for text in client.texts}) == 1
        server._context = known_to(new)
        assert server.stop() == 0
