"""Requests that a page of another site may make a browser send. With a real browser: test_browser.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.setting_groups.http import BrowserSettings
from lora_serve.core.setting_texts import WebHost, parse_host, parse_name, parse_origin
from lora_serve.core.settings import load_settings
from lora_serve.server.routes import TABLE
from tests.server.sockets.test_framing import raw

APP = "https://app.example.org"
JSON = b"Content-Type: application/json\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
KEY = b"Authorization: Bearer admin-key-of-the-tests\r\n"
PATHS = (*dict.fromkeys(route.path.format(id="a", tenant="a", key="k", file="f") for route in TABLE.routes), "/nowhere")


@pytest.fixture
def rules() -> BrowserSettings:
    return BrowserSettings()


@pytest.fixture
def host() -> str:
    """Where the server says that it is bound."""
    return "127.0.0.1"


@pytest.fixture
def server_config(server_config: ServerConfig, rules: BrowserSettings, host: str) -> ServerConfig:
    return replace(server_config, **asdict(rules) | {"host": host})


def named(*origins: str, hosts: Iterable[str] = ()) -> BrowserSettings:
    return BrowserSettings(allowed_hosts=tuple(hosts), allowed_origins=origins)


def request(method: str, path: str, headers: bytes = b"", body: bytes = b"", host: str = "localhost") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n".encode("latin-1") + headers + length + b"\r\n" + body


def code(body: bytes) -> Any:
    return json.loads(body)["error"]["code"]


OWN_HOSTS = ("localhost", "LocalHost:8000", "localhost.", "ui.localhost:1", "127.0.0.1:80", "127.9.9.9", "[::1]:8000")
OTHER_HOSTS = (
    "evil.test",
    "evil.test:8000",
    "evil.test.",
    "localhost.evil.test",
    "127.0.0.1.evil.test",
    "notlocalhost",
    "192.168.1.5",
    "0.0.0.0:8000",
    "[::]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[::1%lo]",
    "2130706433",
    "127.1",
    "user@localhost",
    "localhost:99999",
    "localhost:8000:1",
    "localhost, evil.test",
    "b\xfccher.test",
    "xn--bcher-kva.test",
    ".localhost",
    "",
)


@pytest.mark.parametrize("host_header", OWN_HOSTS)
async def test_server_without_keys_answers_under_its_own_names(house: Any, host_header: str) -> None:
    status, _, _ = await raw(house, request("POST", "/v1/completions", JSON, BODY, host_header))
    assert (status, len(house.engine.requests)) == (200, 1)


@pytest.mark.many(10)
@pytest.mark.parametrize("host_header", OTHER_HOSTS)
async def test_other_names_reach_nothing(house: Any, host_header: str) -> None:
    status, _, body = await raw(house, request("POST", "/v1/completions", JSON, BODY, host_header))
    assert (status, code(body)) == (403, "foreign_site")
    assert house.engine.requests == []


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_every_route_is_guarded(house: Any, method: str) -> None:
    for path in PATHS:
        for data in (
            request(method, path, KEY, host="evil.test"),
            request(method, path, KEY + b"Origin: http://evil.test\r\n"),
            request(method, path, KEY + b"Sec-Fetch-Site: cross-site\r\n"),
            request("OPTIONS", path, b"Origin: http://evil.test\r\nAccess-Control-Request-Method: POST\r\n"),
        ):
            status, head, body = await raw(house, data)
            assert (status, code(body)) == (403, "foreign_site"), data
            assert b"access-control" not in head.lower()


async def test_refusals_say_which_flag_would_allow_it(house: Any) -> None:
    for data, hint in (
        (request("GET", "/health", host="models.lan:8000"), b"--allowed-hosts models.lan."),
        (request("GET", "/health", b"Origin: https://a.example\r\n"), b"--allowed-origins https://a.example."),
        (request("GET", "/health", b"Origin: null\r\n"), b"--allowed-origins"),
        (request("GET", "/health", b"Sec-Fetch-Site: same-site\r\n"), b"--allowed-origins"),
    ):
        assert hint in (await raw(house, data))[2]


async def test_url_as_a_whole_is_taken_for_the_host_too(house: Any) -> None:
    for target in ("http://evil.test/v1/models", "http://localhost@evil.test/v1/models"):
        assert (await raw(house, request("GET", target)))[0] == 403
    assert (await raw(house, request("GET", "http://localhost/v1/models")))[0] == 200
    assert (await raw(house, request("GET", "http://localhost/v1/models", host="evil.test")))[0] == 403


async def test_host_twice_or_missing_is_no_request(house: Any) -> None:
    assert (await raw(house, request("GET", "/health", b"Host: localhost\r\n")))[0] == 400
    assert (await raw(house, b"GET /health HTTP/1.1\r\n\r\n"))[0] == 400


async def test_http_1_0_without_a_host_is_no_browser(house: Any) -> None:
    assert (await raw(house, b"GET /health HTTP/1.0\r\n\r\n"))[0] == 200
    assert (await raw(house, b"GET /health HTTP/1.0\r\nOrigin: http://localhost\r\n\r\n"))[0] == 403
    assert (await raw(house, b"GET /health HTTP/1.0\r\nHost: evil.test\r\n\r\n"))[0] == 403


FOREIGN = (
    "http://evil.test",
    "null",
    "",
    "http://localhost:3000",
    "https://localhost:8000",
    "http://127.0.0.1:8000",
    "http://localhost.evil.test:8000",
    "http://localhost:8000/",
    "http://localhost:8000, http://evil.test",
    "http://user@localhost:8000",
    "chrome-extension://abcdefgh",
    "file://",
)


@pytest.mark.parametrize("origin", FOREIGN)
async def test_pages_of_other_origins_execute_nothing(house: Any, origin: str) -> None:
    headers = JSON + f"Origin: {origin}\r\n".encode()
    status, _, body = await raw(house, request("POST", "/v1/completions", headers, BODY, "localhost:8000"))
    assert (status, code(body)) == (403, "foreign_site")
    assert house.engine.requests == []


@pytest.mark.parametrize(
    ("host_header", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("LOCALHOST:80", "http://localhost"),
        ("localhost", "http://localhost:80"),
        ("[::1]:8000", "http://[0:0::1]:8000"),
        ("localhost.:8000", "http://localhost.:8000"),
    ],
)
async def test_own_pages_may(house: Any, host_header: str, origin: str) -> None:
    headers = JSON + f"Origin: {origin}\r\nSec-Fetch-Site: same-origin\r\n".encode()
    assert (await raw(house, request("POST", "/v1/completions", headers, BODY, host_header)))[0] == 200


async def test_two_origins_are_not_one_of_them(house: Any) -> None:
    headers = b"Origin: http://localhost\r\nOrigin: http://evil.test\r\n"
    assert (await raw(house, request("GET", "/v1/models", headers)))[0] in (400, 403)


@pytest.mark.parametrize(("site", "status"), [("none", 200), ("same-origin", 200), ("same-site", 403), ("?", 403)])
async def test_browser_says_where_from(house: Any, site: str, status: int) -> None:
    assert (await raw(house, request("GET", "/v1/models", f"Sec-Fetch-Site: {site}\r\n".encode())))[0] == status


async def test_links_lead_to_pages_for_people_only(house: Any) -> None:
    followed = b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: "
    assert (await raw(house, request("GET", "/docs", followed + b"document\r\n")))[0] == 200
    assert (await raw(house, request("GET", "/docs", followed + b"iframe\r\n")))[0] == 403
    assert (await raw(house, request("GET", "/metrics", followed + b"document\r\n")))[0] == 403
    assert (await raw(house, request("GET", "/docs", followed + b"document\r\n", host="evil.test")))[0] == 403


async def test_refusal_does_not_wait_for_the_body(house: Any) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: evil.test\r\nContent-Length: 50000\r\n\r\n"
    assert (await raw(house, head))[0] == 403


SIMPLE = (
    b"",
    b"Content-Type: \r\n",
    b"Content-Type: text/plain\r\n",
    b"Content-Type: application/x-www-form-urlencoded\r\n",
    b"Content-Type: multipart/form-data; boundary=x\r\n",
    b"Content-Type: text/plain; application/json\r\n",
)


@pytest.mark.parametrize("kind", SIMPLE)
async def test_body_that_does_not_say_that_it_is_json_is_415(house: Any, kind: bytes) -> None:
    """These are the bodies that a browser sends for any page without asking first."""
    status, _, body = await raw(house, request("POST", "/v1/completions", kind, BODY))
    assert (status, code(body)) == (415, "unsupported_media_type")
    assert house.engine.requests == []


class TestWithKeys:
    @pytest.fixture
    def auth_required(self) -> bool:
        return True

    async def test_probes_and_scrapers_call_it_by_any_name(self, house: Any) -> None:
        for name in ("10.1.2.3:8000", "server", "evil.test"):
            for path in ("/health", "/metrics", "/ping"):
                assert (await raw(house, request("GET", path, host=name)))[0] == 200

    async def test_no_page_can_add_the_key_so_none_is_refused_but_for_it(self, house: Any) -> None:
        foreign = b"Origin: http://evil.test\r\nSec-Fetch-Site: cross-site\r\n"
        assert (await raw(house, request("POST", "/v1/completions", foreign, BODY)))[0] == 401
        asked = foreign + b"Access-Control-Request-Method: POST\r\n"
        status, head, _ = await raw(house, request("OPTIONS", "/v1/completions", asked))
        assert (status, b"access-control" in head.lower()) == (405, False)

    async def test_body_may_leave_its_type_out(self, house: Any) -> None:
        assert (await raw(house, request("POST", "/v1/completions", KEY, BODY)))[0] == 200
        assert (await raw(house, request("POST", "/v1/completions", KEY + SIMPLE[2], BODY)))[0] == 415


class TestBoundElsewhere:
    @pytest.fixture
    def host(self) -> str:
        return "models.lan"

    async def test_an_address_cannot_be_rebound_and_the_name_is_its_own(self, house: Any) -> None:
        for name in ("10.1.2.3:8000", "[fe80::1]:8000", "MODELS.lan:8000", "localhost"):
            assert (await raw(house, request("GET", "/health", host=name)))[0] == 200
        for name in ("evil.test", "a.models.lan"):
            assert (await raw(house, request("GET", "/health", host=name)))[0] == 403


class TestNamed:
    @pytest.fixture
    def rules(self) -> BrowserSettings:
        return named(APP, "http://localhost:3000", hosts=["models.lan"])

    async def test_named_host_is_served(self, house: Any) -> None:
        assert (await raw(house, request("GET", "/health", host="Models.LAN:8000")))[0] == 200
        assert (await raw(house, request("GET", "/health", host="evil.lan")))[0] == 403

    async def test_named_origin_is_answered_so_that_its_page_can_read_it(self, house: Any) -> None:
        headers = JSON + f"Origin: {APP}\r\nSec-Fetch-Site: cross-site\r\n".encode()
        status, head, _ = await raw(house, request("POST", "/v1/completions", headers, BODY))
        assert status == 200
        assert f"Access-Control-Allow-Origin: {APP}\r\n".encode() in head
        assert b"Vary: Origin\r\n" in head
        assert b"X-Adapter-Id" in head.partition(b"Access-Control-Expose-Headers: ")[2].partition(b"\r\n")[0]
        assert b"allow-credentials" not in head.lower()

    async def test_errors_can_be_read_too(self, house: Any) -> None:
        headers = f"Origin: {APP}\r\n".encode()
        status, head, _ = await raw(house, request("POST", "/v1/completions", headers + JSON, b"{"))
        assert (status, b"Access-Control-Allow-Origin" in head) == (400, True)

    async def test_named_origin_is_told_that_it_may_ask(self, house: Any) -> None:
        asked = f"Origin: {APP}\r\nAccess-Control-Request-Method: PUT\r\n".encode()
        names = b"Access-Control-Request-Headers: authorization,content-type, x-stainless-lang\r\n"
        status, head, _ = await raw(house, request("OPTIONS", "/admin/adapters/a", asked + names))
        assert status == 204
        assert b"Access-Control-Allow-Headers: authorization,content-type, x-stainless-lang\r\n" in head
        assert b"PUT" in head.partition(b"Access-Control-Allow-Methods: ")[2].partition(b"\r\n")[0]
        status, head, _ = await raw(
            house, request("OPTIONS", "/health", asked + b"Access-Control-Request-Headers: \xff\r\n")
        )
        assert (status, b"Allow-Headers" in head) == (204, False)

    async def test_others_are_refused_as_ever(self, house: Any) -> None:
        for origin in ("http://app.example.org", f"{APP}:8443", f"{APP}.evil.test", "null", "http://localhost:3001"):
            headers = f"Origin: {origin}\r\n".encode()
            status, head, _ = await raw(house, request("GET", "/v1/models", headers))
            assert (status, b"access-control" in head.lower(), b"Vary: Origin" in head) == (403, False, True)


@pytest.mark.parametrize(
    ("text", "host_and_port"),
    [
        ("A.b_c-d.", WebHost("a.b_c-d")),
        ("a:0", WebHost("a")),
        ("a:", WebHost("a")),
        ("[0:0::1]:5", WebHost("::1", 5)),
        ("::1", None),
        ("[1.2.3.4]", None),
        ("a b", None),
        (".", None),
        ("a\n", None),
        ("\u0661:80", None),
    ],
)
def test_hosts_are_read_strictly(text: str, host_and_port: WebHost | None) -> None:
    assert parse_host(text) == host_and_port


def test_names_in_settings_have_no_port_and_origins_no_path() -> None:
    assert [parse_name(text) for text in ("::1", "[::1]", "a:80", "A", "*", "http://a")] == [
        "::1",
        "::1",
        None,
        "a",
        None,
        None,
    ]
    assert [parse_origin(text) for text in ("*", "null", "https://a/", "a.example", "https://*.a")] == [None] * 5


def load(tmp_path: Path, *flags: str) -> ServerConfig:
    (tmp_path / "config.json").write_text("{}")
    return load_settings(["--model", str(tmp_path), *flags]).part(ServerConfig)


def test_settings_name_hosts_and_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_ALLOWED_ORIGINS", f"HTTPS://App.example.org:443,{APP}:444")
    rules = load(tmp_path, "--allowed-hosts", "Models.LAN", "::1")
    wanted = named(APP, f"{APP}:444", hosts=["models.lan", "::1"])
    assert (rules.hosts, rules.origins) == (wanted.hosts, wanted.origins)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--allowed-hosts", value) for value in ("*", "a:80", "http://a", "b\xfccher.test")),
        *(("--allowed-origins", value) for value in ("*", "null", "https://a.example/path", "a.example")),
    ],
)
def test_settings_refuse_what_would_never_match(tmp_path: Path, flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: "):
        load(tmp_path, flag, value)
