"""A real server process on a tiny model, for the tests of all files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from openai import OpenAI

from lora_serve.commands.server_process import ServerProcess
from tests.engine_choice import PATIENCE, EngineHost, hosted_by
from tests.redis_server import RedisServer
from tests.tiny_site import save_site

KEY = "admin-key-of-the-tests"
ADMIN = {"Authorization": f"Bearer {KEY}"}
PAIR = "replica-one", "replica-other"
NAMES = ("acme/a", "acme/b", "globex/c", "globex/d")


@dataclass(frozen=True)
class Site:
    """Files that a server needs, and where its engine is to run."""

    model: Path
    adapters: dict[str, Path]
    root: Path
    host: EngineHost

    def store(self, name: str) -> Path:
        """A folder that servers of other hosts do not use."""
        return self.root / f"{name}-{self.host.name}"

    def arguments(self, store: str, *more: str) -> list[str]:
        """Flags for `serve`, without the engine's."""
        return [
            "--model", str(self.model), "--served-model-name", "tiny", "--admin-key", KEY,
            "--store", str(self.store(store)), "--adapter-root", str(self.root),
            "--max-model-len", "96", "--kv-cache-memory", "4MiB", "--max-loras", "4", *more,
        ]  # fmt: skip

    def modules(self) -> list[str]:
        """Flags that register all adapters."""
        return ["--lora-modules", *(f"{name}={folder}" for name, folder in self.adapters.items())]

    def log(self, store: str) -> Path:
        return self.store(store).with_suffix(".log")

    def serving(
        self, store: str, *flags: str, log: Path | None = None, wrapper: Sequence[str] = ()
    ) -> AbstractContextManager[ServerProcess]:
        """A server that is ready."""
        return self.host.serving(self.arguments(store, *flags), log or self.log(store), wrapper=wrapper)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """For engines in a thread."""
    root = tmp_path_factory.mktemp("site")
    model, adapters = save_site(root, NAMES)
    return Site(model, adapters, root, hosted_by("thread"))


@pytest.fixture(scope="session")
def site(files: Site, engine_host: EngineHost) -> Site:
    return replace(files, host=engine_host)


@pytest.fixture(scope="session")
def servers(ray_cluster: object) -> Iterator[Callable[[Site], ServerProcess]]:
    """One server with all adapters for each host, started for whoever asks first; tests may kill its engine."""
    started = dict[str, ServerProcess]()
    with ExitStack() as stack:

        def server_of(site: Site) -> ServerProcess:
            if site.host.name not in started:
                flags = "--max-num-batched-tokens", "64", "--engine-max-restarts", "50", *site.modules()
                started[site.host.name] = stack.enter_context(site.serving("store", *flags))
            return started[site.host.name]

        yield server_of


@pytest.fixture(scope="session")
def server(servers: Callable[[Site], ServerProcess], site: Site) -> ServerProcess:
    return servers(site)


@dataclass(frozen=True)
class Pair:
    """Two servers that want keys, their one registry, and where each keeps its files."""

    one: ServerProcess
    other: ServerProcess
    redis: RedisServer
    site: Site

    @property
    def stores(self) -> list[Path]:
        return [self.site.store(name) for name in PAIR]


@pytest.fixture(scope="session")
def pair(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """They share their engines, where these can be shared. Tests may kill Redis and the engines, not the servers."""
    redis = RedisServer(tmp_path_factory.mktemp("redis"), append_only=True)
    redis.start()
    flags = "--redis-url", redis.url, "--auth", "on", "--warmup", "off", "--engine-max-restarts", "50"
    try:
        with site.host.fleet() as chosen, ExitStack() as stack:
            one, other = (
                stack.enter_context(ServerProcess(site.arguments(name, *flags, *chosen), site.log(name)))
                for name in PAIR
            )
            for process in (one, other):
                process.wait_until_ready(PATIENCE)
            yield Pair(one, other, redis, site)
    finally:
        redis.stop()


@pytest.fixture
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
