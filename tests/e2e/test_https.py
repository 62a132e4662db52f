"""`serve` with a certificate, renewed while it runs; and where it refuses to start."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from openai import DefaultHttpxClient, OpenAI

from lora_serve.commands.server_process import HOST
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import load_settings
from tests.certificates import make_certificate
from tests.e2e.conftest import Site
from tests.e2e.https_server import HttpsServer

ELSEWHERE = """
import socket, sys
found = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **named: found("0.0.0.0" if host == "localhost" else host, *more, **named)
from lora_serve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_server_speaks_https_and_takes_a_renewed_certificate_on_sighup(site: Site, tmp_path: Path) -> None:
    files = make_certificate(tmp_path / "tls")
    flags = ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
    context = files.client_context()
    make = partial(HttpsServer, context)
    with site.host.serving(site.arguments("https", *flags), tmp_path / "log", make=make) as server:
        with (
            DefaultHttpxClient(verify=context) as transport,
            OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=transport, timeout=300) as client,
        ):
            assert (
                client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].finish_reason == "length"
            )
        before = ssl.get_server_certificate((HOST, server.port))
        make_certificate(tmp_path / "tls", authority=files.authority)
        os.kill(server.pid, signal.SIGHUP)
        for _ in range(2400):
            if "read anew" in server.log.read_text():
                break
            threading.Event().wait(0.05)
        assert ssl.get_server_certificate((HOST, server.port)) != before
        assert server.is_ready()
        log = server.log.read_text()
        assert re.search(rf"ready: {server.url} .*; the console: {server.url}/ui/", log)
        assert str(tmp_path) not in server.log.read_text()
        assert server.stop() == 0


@pytest.mark.parametrize(("auth", "code"), [([], 2), pytest.param(["--auth", "auto"], 2, marks=pytest.mark.nightly)])
def test_server_that_others_could_use_without_a_key_does_not_start(
    site: Site, tmp_path: Path, auth: list[str], code: int
) -> None:
    flags = ["serve", *site.arguments("elsewhere"), "--host", "localhost", "--port", "0", *auth]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *flags], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    assert "lora-serve: error: --host: localhost is 0.0.0.0" in done.stderr
    assert "--auth on, or --auth off" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-keyfile", "{dir}/key"], "--ssl-certfile: is required"),
        (["--ssl-cert-reqs", "2"], "--ssl-certfile: is required"),
        (["--ssl-certfile", "{dir}/absent"], "--ssl-certfile: .* is not a file"),
        (["--ssl-certfile", "{dir}/cert", "--ssl-cert-reqs", "2"], "--ssl-ca-certs: is required"),
        (["--ssl-certfile", "{dir}/cert", "--ssl-cert-reqs", "3"], "--ssl-cert-reqs: .*less than or equal to 2"),
        (["--otlp-traces-endpoint", "localhost:4318"], "--otlp-traces-endpoint: expected a URL"),
        (["--metrics-tenants", "-1"], "--metrics-tenants"),
        (["--metrics-names", "all"], "--metrics-names"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_in_words(tmp_path: Path, flags: list[str], words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "cert").write_text("")
    given = [flag.replace("{dir}", str(tmp_path)) for flag in flags]
    with pytest.raises(ConfigError, match=words):
        load_settings(["--model", str(tmp_path), *given])
