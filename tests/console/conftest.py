"""A real Chromium before a real server: the demo's model and adapters, a key of each role.

One browser and one server per worker: tests use tenants and adapters of names of their own. A page goes from test to
test, emptied in between, as a new one costs more than what most tests do with it. Whatever a page logs as an error,
whatever breaks its policy and whatever it asks of another host fails the test that opened it.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Error,
    Page,
    Request,
    WebError,
    async_playwright,
    expect,
)

from lora_serve.commands.demo import DATA, adapter_folders, demo_arguments
from lora_serve.commands.server_process import ServerProcess

HERE = Path(__file__).parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
ADMIN_KEY = "admin-key-of-the-console"
TENANT = "acme"  # has one of the demo's adapters, and keys
PATIENCE_MS = 15_000  # on a busy machine
MAX_UPLOAD = 2 * 2**20
EMPTIED = "localStorage.clear(); sessionStorage.clear(); location.replace('about:blank')"
WATCH_POLICY = """
addEventListener('securitypolicyviolation',
    event => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser lives on one loop, which its tests share."""
    for item in items:
        if item.path.is_relative_to(HERE) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@dataclass(frozen=True)
class Console:
    """A server with the console, and a key of each role."""

    process: ServerProcess
    url: str  # without a slash at its end
    admin: str = field(repr=False)
    tenant_admin: str = field(repr=False)  # of TENANT
    inference: str = field(repr=False)  # of TENANT

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """The API without a browser: the answer's JSON. Blocks for a moment."""
        return call(self.url, method, path, body, key or self.admin)


def call(url: str, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/{path.lstrip('/')}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def serve(folder: Path, *arguments: str, port: int = 0, adapters: int | None = None) -> ServerProcess:
    """The demo's server, which `with` starts; `adapters`: at most so many of the demo's."""
    folders = dict(list(adapter_folders().items())[:adapters])
    flags = [*demo_arguments(folder / "store", folders), "--admin-key", ADMIN_KEY, "--auth", "on", *arguments]
    return ServerProcess(flags, folder / "server.log", port)


def with_keys(process: ServerProcess) -> Console:
    """A tenant, and a key of each role, at a server that is ready."""
    call(process.url, "POST", "admin/tenants", {"name": TENANT})
    made = {
        role: call(process.url, "POST", f"admin/tenants/{TENANT}/keys", {"name": role, "role": role})["secret"]
        for role in ("tenant-admin", "inference")
    }
    return Console(process, process.url, ADMIN_KEY, made["tenant-admin"], made["inference"])


@pytest.fixture(scope="session")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """The worker's server. Tests that stop it, or fill it, start one of their own: `serve`."""
    roots = ("--adapter-root", str(DATA / "adapters"), "--adapter-root", str(tmp_path_factory.getbasetemp()))
    with serve(tmp_path_factory.mktemp("console"), "--max-upload-size", str(MAX_UPLOAD), *roots) as process:
        process.wait_until_ready(120)
        yield with_keys(process)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        assert CHROMIUM, "no Chromium is installed: apt-get install chromium"
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        await started.close()


@dataclass
class Watch:
    """Notes the faults of pages. `allowed`: parts of the texts of faults that a test expects ("401")."""

    allowed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)  # of every request
    hosts: set[str] = field(default_factory=set)  # that pages may ask

    def follow(self, context: BrowserContext, url: str) -> None:
        self.hosts.add(urlsplit(url).netloc)
        for name, listener in self._listeners():
            context.on(name, listener)

    def leave(self, context: BrowserContext) -> None:
        for name, listener in self._listeners():
            context.remove_listener(name, listener)

    def _listeners(self) -> list[tuple[Any, Callable[[Any], None]]]:
        return [("request", self._asked), ("console", self._logged), ("weberror", self._failed)]

    def _asked(self, request: Request) -> None:
        self.urls.append(request.url)
        parts = urlsplit(request.url)
        if parts.scheme not in ("blob", "data") and parts.netloc not in self.hosts:
            self.faults.append(f"asked another host: {request.url}")

    def _logged(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.faults.append(message.text)

    def _failed(self, error: WebError) -> None:
        self.faults.append(str(error.error))

    def check(self) -> None:
        assert [one for one in self.faults if not any(part in one for part in self.allowed)] == []


OpenPage = Callable[..., Awaitable[Page]]


@pytest.fixture
def watch() -> Watch:
    return Watch()


@dataclass
class Pages:
    """The pages that no test uses at present, by the options of their contexts; one context has one page."""

    browser: Browser
    free: dict[str, Page] = field(default_factory=dict)

    async def take(self, options: dict[str, Any]) -> Page:
        return self.free.pop(repr(options), None) or await self.new(WATCH_POLICY, options)

    async def new(self, script: str, options: dict[str, Any]) -> Page:
        context = await self.browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        await context.add_init_script(script)
        return await context.new_page()

    async def give_back(self, page: Page, options: dict[str, Any]) -> None:
        """Without what its server was told to keep, on no page; thrown away if it is not whole."""
        try:
            await page.unroute_all(behavior="ignoreErrors")
            await page.evaluate(EMPTIED)
            await page.wait_for_url("about:blank")
            self.free[repr(options)] = page
        except Error:
            await page.context.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def free_pages(browser: Browser) -> Pages:
    return Pages(browser)


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(free_pages: Pages, watch: Watch) -> AsyncIterator[OpenPage]:
    """open_page(url, **options of the context) -> a page at /ui/ of the server at `url`.

    `is_own`: its context is of this test alone, as it is changed beyond what can be undone; so is one with a script.
    """
    taken: list[tuple[Page, dict[str, Any] | None]] = []

    async def opened(
        url: str, fragment: str = "", *, path: str = "/ui/", before: str = "", is_own: bool = False, **options: Any
    ) -> Page:
        is_own = is_own or before != ""
        page = await (free_pages.new(WATCH_POLICY + before, options) if is_own else free_pages.take(options))
        taken.append((page, None if is_own else options))
        watch.follow(page.context, url)
        await page.goto(url + path + fragment)
        return page

    expect.set_options(timeout=PATIENCE_MS)
    yield opened
    for page, options in taken:
        watch.leave(page.context)
        await (page.context.close() if options is None else free_pages.give_back(page, options))
    watch.check()


async def signed_in(page: Page, key: str) -> Page:
    """The page, once its form has taken the key."""
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    return page
