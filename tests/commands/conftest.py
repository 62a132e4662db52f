"""`lora-serve adapters ...` in a thread, against the real application or a stub, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_serve.cli import main
from tests.commands.stub_server import StubServer
from tests.server.conftest import (  # noqa: F401 (fixtures)
    KEY,
    adapter_config,
    auth_required,
    catalog,
    directory,
    house,
    make_adapter,
    server_config,
    services,
    sources,
    spec,
    text_model,
    verifier,
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as one line of JSON."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


Adapters = Callable[..., Awaitable[Ended]]
Run = Callable[..., Awaitable[Ended]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings, and no servers that other tests may have started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("URL", "STORE", "ADMIN_KEY"):
        monkeypatch.delenv(f"LORA_SERVE_{name}", raising=False)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """program("tenants", "list") -> Ended, with the right key unless the environment is changed; no server named."""
    monkeypatch.setenv("LORA_SERVE_ADMIN_KEY", KEY)

    async def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = await asyncio.to_thread(main, list(arguments))
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def adapters(program: Run) -> Adapters:
    """adapters("show", "acme/a") -> Ended, as `program`."""
    return partial(program, "adapters")


@pytest.fixture
def run(program: Run, house: Any, monkeypatch: pytest.MonkeyPatch) -> Run:  # noqa: F811
    """run("tenants", "list") -> Ended, at the house and with its key."""
    monkeypatch.setenv("LORA_SERVE_URL", house.url)
    return program


@pytest.fixture
def ask(adapters: Adapters, house: Any, monkeypatch: pytest.MonkeyPatch) -> Adapters:  # noqa: F811
    """`adapters`, at the real application."""
    monkeypatch.setenv("LORA_SERVE_URL", house.url)
    return adapters


@pytest.fixture
async def stub() -> AsyncIterator[StubServer]:
    async with StubServer() as server:
        yield server


@pytest.fixture
def ask_stub(adapters: Adapters, stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    """`adapters`, at the stub."""
    monkeypatch.setenv("LORA_SERVE_URL", stub.url)
    return adapters
