"""What every part of the tests may use."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import socket
import tempfile
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests import engine_choice, tiers
from tests.engine_choice import engine_host, ray_cluster

__all__ = ["engine_host", "ray_cluster"]

pytest.register_assert_rewrite("tests.canary.watch", "tests.faults.injecting", "tests.hostile.sending")

from lora_serve.adapters.catalog import ledger  # noqa: E402
from lora_serve.commands import server_process  # noqa: E402
from tests.redis_server import RedisServer  # noqa: E402
from tests.zygote import FORKING  # noqa: E402

# Triton reads it when it is first imported: its programs run in its interpreter, on tensors of the CPU.
# tests/gpu compile them instead (scripts/gpu_check).
os.environ.setdefault("TRITON_INTERPRET", "1")


# Servers of tests are not among those that this user's commands find.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="lora_serve_tests_state_")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    engine_choice.add_options(parser)
    tiers.add_options(parser)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    engine_choice.parametrize(metafunc)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all is collected: little of that is garbage, and looking for it takes a fifth of the time
    settings.load_profile("default" if tiers.is_default(config) else "nightly")
    tiers.register_markers(config)
    tiers.choose(config)


def pytest_report_header(config: pytest.Config) -> str:
    words: str = config.option.words_of_parts
    return words


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    engine_choice.select(config, items)
    tiers.mark(config, items)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return engine_choice.report(config)


def pytest_collection_finish() -> None:
    """Python's collector need not look at all that was imported each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def sockets_of_closed_servers_are_closed() -> Iterator[None]:
    """Python 3.11's asyncio forgets a socket that it accepted right before its server was closed; the warning about it
    would fail whichever test the collector comes by in.
    """
    take_in = BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]

    async def accept(
        loop: Any, protocol: Any, accepted: socket.socket, extra: Any, tls: Any, server: Any, *more: Any
    ) -> None:
        if server is not None and not server.is_serving():
            accepted.close()
        else:
            await take_in(loop, protocol, accepted, extra, tls, server, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseSelectorEventLoop, "_accept_connection2", accept)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_followers() -> Iterator[None]:
    """Catalogs of tests are closed as soon as their followers have waited for news: not for a whole second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "_LONGEST_WAIT", 0.03)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_servers(pytestconfig: pytest.Config) -> Iterator[None]:
    """By day servers are forked where that is the same; with `--engine` all are started as ever."""
    with pytest.MonkeyPatch.context() as patch:
        if tiers.is_default(pytestconfig) and not pytestconfig.getoption("engine"):
            patch.setattr(server_process, "subprocess", FORKING)
        yield


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests of this process that leave it running."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """Of an empty database."""
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis.url


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that the test may kill; it keeps an append-only file."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), append_only=True)
    server.start()
    yield server
    server.stop()
