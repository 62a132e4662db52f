"""HTTPS over a real socket: the openai client, old protocols, client certificates, a renewed certificate."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from lora_serve.core.errors import ConfigError
from lora_serve.core.setting_groups.http import TlsConfig
from lora_serve.server.app import build_app
from lora_serve.server.services import Services
from lora_serve.server.sockets.http_runner import HttpRunner
from lora_serve.server.sockets.listener import ServerTls
from tests.certificates import Certificate, make_certificate

Serve = Callable[[ServerTls], Awaitable[int]]


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path / "tls")


def config_of(files: Certificate, **changes: Any) -> TlsConfig:
    return TlsConfig(
        **{
            "ssl_certfile": files.certificate,
            "ssl_keyfile": files.key,
            "ssl_ca_certs": None,
            "ssl_cert_reqs": 0,
            **changes,
        }
    )


@pytest.fixture
async def serve(services: Services) -> AsyncIterator[Serve]:
    """serve(tls) -> the port."""
    runner = HttpRunner(build_app(services), shutdown_timeout=1.0)
    await runner.setup()

    async def start(tls: ServerTls) -> int:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.context).start()
        return int(runner.addresses[0][1])

    yield start
    await runner.cleanup()


async def seen_by(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown (DER)."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def test_openai_client_speaks_https(certificate: Certificate, serve: Serve) -> None:
    port = await serve(ServerTls(config_of(certificate)))
    async with (
        DefaultAsyncHttpxClient(verify=certificate.client_context()) as transport,
        AsyncOpenAI(base_url=f"https://127.0.0.1:{port}/v1", api_key="none", http_client=transport) as client,
    ):
        answer = await client.completions.create(model="tiny-base", prompt="x", max_tokens=2)
        stream = await client.completions.create(model="tiny-base", prompt="x", max_tokens=2, stream=True)
        chunks = [chunk async for chunk in stream]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_certificate_and_key_may_be_one_file(certificate: Certificate, serve: Serve) -> None:
    port = await serve(ServerTls(config_of(certificate, ssl_certfile=certificate.both, ssl_keyfile=None)))
    assert await seen_by(port, certificate.client_context())


async def test_plain_http_gets_no_answer_from_an_https_port(certificate: Certificate, serve: Serve) -> None:
    port = await serve(ServerTls(config_of(certificate)))
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
async def test_nothing_older_than_tls_1_2_is_spoken(certificate: Certificate, serve: Serve) -> None:
    tls = ServerTls(config_of(certificate))
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    port = await serve(tls)
    old = certificate.client_context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionResetError)):  # the server hangs up
        await seen_by(port, old)
    assert await seen_by(port, certificate.client_context())


async def test_client_without_a_certificate_is_let_in_only_where_none_is_required(
    certificate: Certificate, serve: Serve
) -> None:
    clients = trustme.CA()
    (certificate.certificate.parent / "clients.pem").write_bytes(clients.cert_pem.bytes())
    authorities = certificate.certificate.parent / "clients.pem"
    port = await serve(ServerTls(config_of(certificate, ssl_ca_certs=authorities, ssl_cert_reqs=2)))
    known, stranger = certificate.client_context(), certificate.client_context()
    clients.issue_cert("client@example.org").configure_cert(known)
    trustme.CA().issue_cert("client@example.org").configure_cert(stranger)
    for context, is_in in ((known, True), (stranger, False), (certificate.client_context(), False)):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
            try:
                async with http.get(f"https://127.0.0.1:{port}/health") as answer:
                    assert answer.status == 200
                    entered = True
            except (aiohttp.ClientError, ConnectionError):
                entered = False
        assert entered is is_in


async def test_renewed_certificate_is_shown_after_a_reload(certificate: Certificate, serve: Serve) -> None:
    tls = ServerTls(config_of(certificate))
    port = await serve(tls)
    before = await seen_by(port, certificate.client_context())
    make_certificate(certificate.certificate.parent, authority=certificate.authority)
    assert await seen_by(port, certificate.client_context()) == before
    tls.reload()
    assert await seen_by(port, certificate.client_context()) != before


async def test_authorities_of_clients_are_read_anew_too_and_those_that_left_are_gone(
    certificate: Certificate, serve: Serve
) -> None:
    authorities, old, new = certificate.certificate.parent / "clients.pem", trustme.CA(), trustme.CA()
    old.cert_pem.write_to_path(authorities)
    tls = ServerTls(config_of(certificate, ssl_ca_certs=authorities, ssl_cert_reqs=2))
    port = await serve(tls)
    new.cert_pem.write_to_path(authorities)
    tls.reload()
    for authority, is_in in ((old, False), (new, True)):
        context = certificate.client_context()
        authority.issue_cert("client@example.org").configure_cert(context)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
            try:
                async with http.get(f"https://127.0.0.1:{port}/health") as answer:
                    assert (answer.status == 200) is is_in
            except (aiohttp.ClientError, ConnectionError):
                assert not is_in


async def test_reload_of_a_key_that_does_not_fit_changes_nothing(
    certificate: Certificate, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ServerTls(config_of(certificate))
    port = await serve(tls)
    before = await seen_by(port, certificate.client_context())
    shutil.copyfile(make_certificate(tmp_path / "other").key, certificate.key)
    with caplog.at_level(logging.INFO):
        tls.reload()
    assert "the key is another certificate's" in caplog.text
    assert await seen_by(port, certificate.client_context()) == before


def test_files_that_are_no_certificates_are_refused_in_words(certificate: Certificate, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match=r"--ssl-certfile: .*text"):
        ServerTls(config_of(certificate, ssl_certfile=tmp_path / "text"))
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        ServerTls(config_of(certificate, ssl_ca_certs=tmp_path / "text", ssl_cert_reqs=2))


def test_key_under_a_password_is_refused_and_not_asked_for(certificate: Certificate) -> None:
    key = serialization.load_pem_private_key(certificate.key.read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    certificate.key.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"hush")))
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ServerTls(config_of(certificate))
