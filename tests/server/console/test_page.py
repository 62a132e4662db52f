"""GET /ui and its files: compressed, asked about again, under a policy of their own, and off where nobody asked."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.console.files import FOLDER, INDEX, imported, page_files
from lora_serve.core.config import ServerConfig
from lora_serve.server.console import is_on

RAW = {"Accept-Encoding": "identity"}


async def test_page_and_its_files_have_their_types_and_policy(http: aiohttp.ClientSession) -> None:
    kinds = {"": "text/html", "main.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}
    for name, kind in kinds.items():
        async with http.get(f"/ui/{name}", headers=RAW) as answer:
            assert answer.status == 200
            assert answer.content_type == kind
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            rules = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
            assert rules == {
                "default-src": "'self'",
                "frame-ancestors": "'none'",
                "base-uri": "'none'",
                "form-action": "'none'",
            }
            assert await answer.read() == page_files()[name or INDEX].content


async def test_root_leads_a_browser_to_the_console_and_tells_others_the_ways_in(http: aiohttp.ClientSession) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with http.get("/", headers=browser, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (307, "ui/")
    async with http.get("/") as answer:
        told = await answer.json()
    assert told["links"].keys() == {"console", "docs", "openapi"}
    for link in told["links"].values():
        async with http.get(f"/{link}") as answer:
            assert answer.status == 200, link
    assert {"POST /v1/chat/completions", "POST /v1/messages", "GET /v1/models"} <= set(told["routes"])
    assert not [call for call in told["routes"] if "admin" in call or "/v1/embeddings" in call]  # the model generates


async def test_page_has_a_slash_at_its_end_wherever_a_proxy_puts_it(http: aiohttp.ClientSession) -> None:
    async with http.get("/ui", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (308, "ui/")


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0, br", False), ("identity", False)],
)
async def test_file_is_compressed_for_who_takes_that(http: aiohttp.ClientSession, accepted: str, packed: bool) -> None:
    async with http.get("/ui/main.js", headers={"Accept-Encoding": accepted}, auto_decompress=False) as answer:
        body = await answer.read()
        assert ("gzip" in answer.headers.get("Content-Encoding", "")) == packed
        assert answer.headers["Vary"] == "Accept-Encoding"
        assert (gzip.decompress(body) if packed else body) == (FOLDER / "main.js").read_bytes()


async def test_file_that_is_known_is_not_sent_again(http: aiohttp.ClientSession) -> None:
    tags = []
    for accepted in ("gzip", "identity"):
        async with http.get("/ui/main.js", headers={"Accept-Encoding": accepted}) as answer:
            tags.append(answer.headers["ETag"])
            assert answer.headers["Cache-Control"] == "no-cache"
    assert len({*tags}) == 2
    cases = {tags[0]: 304, f'"x", W/{tags[0]}': 304, "*": 304, tags[1]: 200, '"x"': 200, "garbage": 200}
    for known, status in cases.items():
        sent = {"Accept-Encoding": "gzip", "If-None-Match": known}
        async with http.get("/ui/main.js", headers=sent) as answer:
            assert answer.status == status, known
            assert answer.headers["ETag"] == tags[0]
            assert (await answer.read() == b"") == (status == 304)


async def test_head_tells_the_length_alone(http: aiohttp.ClientSession) -> None:
    for path in ("/ui/", "/ui/app.css"):
        async with http.get(path, headers=RAW) as answer:
            length = answer.headers["Content-Length"]
        async with http.head(path, headers=RAW) as answer:
            assert (answer.status, answer.headers["Content-Length"], await answer.read()) == (200, length, b"")


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "../page.py",
        "..%2f..%2fpyproject.toml",
        "lib",
        "%2e%2e/files.py",
        "/etc/passwd",
        "vendor/LICENSE.htm",
    ],
)
async def test_no_name_leads_out_of_the_folder(house: Any, http: aiohttp.ClientSession, name: str) -> None:
    from yarl import URL

    async with http.get(URL(f"{house.url}/ui/{name}", encoded=True)) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "not_found"


async def test_other_methods_are_refused(http: aiohttp.ClientSession) -> None:
    for path in ("/ui/", "/ui/main.js"):
        async with http.post(path) as answer:
            assert answer.status == 405


@pytest.mark.parametrize("required", [False, True])
async def test_page_is_told_whether_a_key_is_asked_for(
    http: aiohttp.ClientSession, services: Any, required: bool
) -> None:
    assert services.authenticator.required is False
    object.__setattr__(services.authenticator, "required", required)
    async with http.get("/ui/about.json") as answer:
        assert (await answer.json())["asks_for_key"] is required


class TestOff:
    @pytest.fixture
    def server_config(self, server_config: ServerConfig) -> ServerConfig:
        return replace(server_config, ui=False)

    async def test_console_that_is_off_says_how_to_turn_it_on(self, http: aiohttp.ClientSession) -> None:
        for path in ("/ui", "/ui/", "/ui/main.js", "/ui/about.json"):
            async with http.get(path, allow_redirects=False) as answer:
                assert answer.status == 404
                assert "--ui" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("host", "ui", "on"),
    [("127.0.0.1", None, True), ("::1", None, True), ("0.0.0.0", None, False), ("0.0.0.0", True, True)],
)
def test_console_is_on_by_itself_on_loopback_alone(
    server_config: ServerConfig, host: str, ui: bool | None, on: bool
) -> None:
    assert is_on(replace(server_config, host=host, ui=ui)) is on


def test_page_names_every_module_that_it_begins_with() -> None:
    """Nothing is found by the browser level after level, and every import is a file of the folder."""
    page = page_files()[INDEX].content.decode()
    named = re.findall(r'rel="modulepreload" href="([^"]+)"', page)
    assert {"vendor/preact-core.js", "texts/common.js", "lib/api.js"} < {*named}
    contents = {name: file.content for name, file in page_files().items()}
    for name in contents:
        if name.endswith(".js") and not name.startswith("vendor/"):
            assert {*imported(contents, name)} <= contents.keys()


def test_page_links_to_files_that_are_there() -> None:
    page = page_files()[INDEX].content.decode()
    links = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert "app.css" in links
    assert [name for name in links if name not in page_files()] == []


def test_page_holds_no_inline_code() -> None:
    page = (FOLDER / INDEX).read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"\son\w+=|\sstyle=|javascript:", page) == []
    for path in FOLDER.rglob("*.js"):
        if path.parent.name != "vendor":
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text()
            ), path
