"""Names of allowed URLs that lead inward, at once or only the second time that they are asked for."""

from __future__ import annotations

import io
import socket
import ssl
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lora_serve.adapters.sources.archive_url import ArchiveUrlSource
from lora_serve.adapters.sources.base import no_progress
from lora_serve.adapters.sources.connections import Timeouts
from lora_serve.core.errors import AdapterUnavailableError, InvalidRequestError
from tests.certificates import make_certificate
from tests.http_thread import serving

OUTER = "93.184.216.34"
INNER = [
    "127.0.0.1",
    "10.0.0.7",
    "172.16.3.4",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "0.0.0.0",
    "224.0.0.1",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fd00:ec2::254",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.7",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "168.63.129.16",
]
METADATA = [
    "169.254.169.254",
    "fe80::1",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "0.0.0.0",
    "224.0.0.1",
    "168.63.129.16",
    "::ffff:168.63.129.16",
    "64:ff9b::a83f:8110",
    "100.100.100.200",
    "192.0.0.192",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd00:c1::a9fe:a9fe",
    "fd20:ce::254",
    "fd00:42::42",
    "fd00:a9fe:a9fe::1",
]


class Internet:
    """A resolver whose answers are given one after the other, the last again and again; and who connects to what.

    Connections to OUTER lead to the server of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[list[str]] = []
        self.asked: list[str] = []
        self.connected: list[str] = []
        self.port = 0
        connect = socket.socket.connect

        def resolve(host: str, port: int, *_: object, **__: object) -> list[Any]:
            self.asked.append(host)
            addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
            return [
                (family, socket.SOCK_STREAM, 6, "", (address, port))
                for family, address in zip(families, addresses, strict=True)
            ]

        def go(sock: socket.socket, place: Any) -> None:
            self.connected.append(place[0])
            if place[0] not in (OUTER, "10.0.0.7"):
                raise ConnectionRefusedError
            connect(sock, ("127.0.0.1", self.port))

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(socket.socket, "connect", go)


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            info = tarfile.TarInfo(name)
            info.size = 1
            made.addfile(info, io.BytesIO(b"x"))
    return buffer.getvalue()


@pytest.fixture
def app() -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("hop"):
            return web.Response(status=302, headers={"Location": "adapter.tar"})
        assert request.headers["Host"].partition(":")[0] == "models.test"
        return web.Response(body=archive())

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app


@pytest.fixture
def internet(app: web.Application, monkeypatch: pytest.MonkeyPatch) -> Iterator[Internet]:
    with serving(app) as url:
        internet = Internet(monkeypatch)
        internet.port = int(url.rpartition(":")[2])
        yield internet


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., set[str]]:
    def fetch(url: str = "http://models.test/a/adapter.tar", **options: Any) -> set[str]:
        (tmp_path / "t").mkdir()
        source = ArchiveUrlSource([url.rpartition("/")[0]], Timeouts(idle=5.0), **options)
        source.fetch(url, tmp_path / "t", 10**6, no_progress)
        return {path.name for path in (tmp_path / "t").iterdir()}

    return fetch


def test_name_on_the_internet_is_resolved_once_and_connected_to(
    internet: Internet, fetch: Callable[..., set[str]]
) -> None:
    internet.answers = [[OUTER], ["127.0.0.1"]]  # what a second question would be told
    assert len(fetch()) == 2
    assert internet.connected == [OUTER]
    assert internet.asked == ["models.test"]


@pytest.mark.parametrize("address", INNER)
def test_name_that_leads_inward_is_not_connected_to(
    internet: Internet, fetch: Callable[..., set[str]], address: str
) -> None:
    internet.answers = [[address]]
    with pytest.raises(InvalidRequestError, match="not on the internet") as caught:
        fetch()
    assert internet.connected == []
    assert address not in str(caught.value)


def test_one_inner_address_among_others_is_enough(internet: Internet, fetch: Callable[..., set[str]]) -> None:
    internet.answers = [[OUTER, "10.0.0.7"]]
    with pytest.raises(InvalidRequestError, match="--adapter-url-inner"):
        fetch()
    assert internet.connected == []


def test_name_that_leads_inward_from_the_second_hop_on_is_connected_to_once(
    internet: Internet, fetch: Callable[..., set[str]]
) -> None:
    """A DNS that changes its answer between a redirect and its target."""
    internet.answers = [[OUTER], ["127.0.0.1"]]
    with pytest.raises(InvalidRequestError, match="not on the internet"):
        fetch("http://models.test/a/hop")
    assert internet.connected == [OUTER]
    assert internet.asked == ["models.test", "models.test"]


def test_inner_address_is_connected_to_if_the_operator_allows_it(
    internet: Internet, fetch: Callable[..., set[str]]
) -> None:
    internet.answers = [["10.0.0.7"]]
    assert len(fetch(allow_inner=True)) == 2
    assert internet.connected == ["10.0.0.7"]


@pytest.mark.parametrize("address", METADATA)
def test_no_setting_lets_a_name_lead_to_the_clouds_metadata(
    internet: Internet, fetch: Callable[..., set[str]], address: str
) -> None:
    internet.answers = [[address]]
    with pytest.raises(InvalidRequestError, match="write the address itself"):
        fetch(allow_inner=True)
    assert internet.connected == []


def test_address_that_the_operator_wrote_is_connected_to(internet: Internet, fetch: Callable[..., set[str]]) -> None:
    internet.answers = [["169.254.7.7"]]
    with pytest.raises(AdapterUnavailableError):  # nothing answers there
        fetch("http://169.254.7.7/a/adapter.tar")
    assert internet.connected == ["169.254.7.7"]


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1"])
def test_other_spellings_of_an_address_are_names(internet: Internet, fetch: Callable[..., set[str]], host: str) -> None:
    internet.answers = [["127.0.0.1"]]  # as the C library reads them
    with pytest.raises(InvalidRequestError, match="not on the internet"):
        fetch(f"http://{host}/a/adapter.tar")
    assert internet.connected == []


@pytest.mark.parametrize(("address", "tried"), [("127.0.0.1", ["127.0.0.1"]), ("10.0.0.8", [])])
def test_localhost_is_this_machine_and_nothing_else(
    internet: Internet, fetch: Callable[..., set[str]], address: str, tried: list[str]
) -> None:
    internet.answers = [[address]]
    with pytest.raises((AdapterUnavailableError, InvalidRequestError)):
        fetch("http://localhost/a/adapter.tar")
    assert internet.connected == tried


def test_next_address_is_tried_if_one_does_not_answer(internet: Internet, fetch: Callable[..., set[str]]) -> None:
    internet.answers = [["8.8.8.8", OUTER]]
    assert len(fetch()) == 2
    assert internet.connected == ["8.8.8.8", OUTER]


@pytest.mark.parametrize(("host", "is_right"), [("models.test", True), ("other.test", False)])
def test_certificate_is_checked_for_the_name_and_not_for_the_address(
    app: web.Application,
    monkeypatch: pytest.MonkeyPatch,
    fetch: Callable[..., set[str]],
    tmp_path: Path,
    host: str,
    is_right: bool,
) -> None:
    files = make_certificate(tmp_path / "tls", host)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(files.certificate, files.key)
    context = files.client_context()
    with serving(app, server) as url, monkeypatch.context() as patch:
        internet = Internet(patch)
        internet.port, internet.answers = int(url.rpartition(":")[2]), [[OUTER]]
        patch.setattr(ssl, "create_default_context", lambda: context)
        if is_right:
            assert len(fetch("https://models.test/a/adapter.tar")) == 2
        else:
            with pytest.raises(AdapterUnavailableError):
                fetch("https://models.test/a/adapter.tar")
        assert internet.connected == [OUTER]
