"""An update server by server, and back, under load: the last version and this one side by side on one Redis."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest

from lora_serve.commands.server_process import ServerFailedError, ServerProcess, free_port
from tests.canary.questions import BASE, World, make_world
from tests.canary.races import Field, make_field
from tests.e2e.conftest import ADMIN, KEY
from tests.engine_choice import PATIENCE
from tests.redis_server import RedisServer
from tests.rolling.holding import counted, missing
from tests.rolling.ledger import LAG, Ledger
from tests.rolling.round_robin import RoundRobin
from tests.rolling.traffic import Traffic
from tests.rolling.versions import EARLIER, HERE, LAST, MissingVersionError, Version, before, unpacked

STEADY = 6.0  # seconds of load before, between and after replacements


class Place:
    """A server's port and folder, which stay while versions come and go."""

    def __init__(self, name: str, root: Path, world: World, codes: dict[str, Path], flags: Sequence[str]) -> None:
        self._name, self._root, self._codes, self._port, self._turns = name, root, codes, free_port(), 0
        self.process: ServerProcess | None = None
        self._arguments = [
            "--model", str(world.model), "--served-model-name", BASE, "--admin-key", KEY, "--auth", "on",
            "--store", str(root / name), "--adapter-root", str(world.root), "--max-model-len", "96",
            "--kv-cache-memory", "4MiB", "--max-loras", "6", "--warmup", "off", "--usage-flush-seconds", "1", *flags,
        ]  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def run(self, version: Version) -> None:
        """The server that ran ends first, as an orchestrator does it; returns when the new one is ready."""
        self.stop()
        self._turns += 1
        log = self._root / f"{self._name}-{self._turns}-{version.name}.log"
        code = self._codes[version.name]
        inside = [] if version is HERE else before(code)
        self.process = ServerProcess(self._arguments, log, self._port, inside=inside).__enter__()
        self.process.wait_until_ready(PATIENCE)

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stop() == 0, self.process.tail()
            self.process = None

    def put_aside(self) -> None:
        """The next server finds an empty store."""
        (self._root / self._name).rename(self._root / f"{self._name}-aside")

    def end(self) -> None:
        if self.process is not None:
            self.process.stop()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("rolling"))


@pytest.fixture(scope="module")
def runners(world: World) -> Field:
    return make_field(world.model, world.adapters["acme/a"], world.root / "racers", 24)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, append_only=True)
    server.start()
    yield server
    server.stop()


def places(version: Version, world: World, tmp_path: Path, names: Sequence[str], *flags: str) -> list[Place]:
    (world.root / tmp_path.name).mkdir()
    codes = {one.name: unpacked(one, tmp_path / "versions") for one in (version, HERE)}
    return [Place(name, world.root / tmp_path.name, world, codes, flags) for name in names]


async def replace(traffic: Traffic, place: Place, version: Version) -> None:
    traffic.client.ending.add(place.url)
    await asyncio.to_thread(place.run, version)
    traffic.client.ending.remove(place.url)
    await asyncio.sleep(STEADY)


async def check(traffic: Traffic, servers: Sequence[Place]) -> None:
    """Nothing is lost on any server, and no client saw what it should not see."""
    await traffic.rest()
    lost = await missing(traffic, [server.url for server in servers])
    print(*counted(traffic), sep="\n")
    assert (traffic.wrong[:10], traffic.client.faults[:10], lost[:10]) == ([], [], [])
    traffic.start()


async def refused(traffic: Traffic, server: Place, version: Version) -> None:
    """The earlier version does not start on files that it cannot read, and says so; on an empty store it serves."""
    traffic.client.ending.add(server.url)
    with pytest.raises(ServerFailedError, match="was made by a newer lora_serve"):
        await asyncio.to_thread(server.run, version)
    assert server.process is not None
    assert server.process.exit_code == 2
    server.process = None
    server.put_aside()
    await replace(traffic, server, version)


async def update_and_return(servers: Sequence[Place], version: Version, runners: Field) -> None:
    """From `version` to the present one and back, under load, each server in its turn."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(120)
    try:
        await asyncio.gather(*(asyncio.to_thread(server.run, version) for server in servers))
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            traffic = Traffic(RoundRobin([server.url for server in servers], session), ADMIN, runners)
            await traffic.settle()
            traffic.start()
            await asyncio.sleep(STEADY)
            for server in servers:
                await replace(traffic, server, HERE)
            await check(traffic, servers)
            if version.can_return:
                for server in servers:
                    await replace(traffic, server, version)
            else:
                await refused(traffic, servers[0], version)
            await check(traffic, servers)
            await traffic.rest()
    finally:
        for server in servers:
            server.end()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", [LAST, EARLIER], ids=lambda version: version.name)
async def test_update_of_one_server_after_the_other_and_back_loses_nothing(
    version: Version, world: World, runners: Field, redis: RedisServer, tmp_path: Path
) -> None:
    await update_and_return(
        places(version, world, tmp_path, ("one", "other"), "--redis-url", redis.url), version, runners
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_update_of_a_server_alone_and_back_loses_nothing(world: World, runners: Field, tmp_path: Path) -> None:
    """Its registry is SQLite's; requests wait while nobody listens."""
    await update_and_return(places(LAST, world, tmp_path, ("one",)), LAST, runners)


def test_versions_that_the_repository_lacks_are_told_in_words(tmp_path: Path) -> None:
    """As in a shallow clone: no test of an update passes for want of the other version."""
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "the only one"]):
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)
    with pytest.raises(MissingVersionError, match=f"no commit {LAST.commit}.*git fetch --unshallow"):
        unpacked(LAST, tmp_path / "versions", tmp_path)


def test_ledger_knows_what_a_name_may_have_meant() -> None:
    ledger = Ledger()
    assert ledger.may_mean("a/x", None, 0, 1)
    assert not ledger.may_mean("a/x", "one", 0, 1)
    ledger.means("a/x", "one", 10.0).answered = 11.0
    assert ledger.may_mean("a/x", None, 0, 1)
    assert ledger.may_mean("a/x", "one", 9, 10.5)
    assert not ledger.may_mean("a/x", "one", 8, 9)
    assert not ledger.may_mean("a/x", None, 12 + LAG, 13 + LAG)
    ledger.means("a/x", "two", 30.0)
    assert ledger.may_mean("a/x", "two", 31, 32)  # it is under way
    assert ledger.may_mean("a/x", "one", 31, 32)
    ledger.names["a/x"][-1].answered = 33.0
    assert not ledger.may_mean("a/x", "one", 34 + LAG, 35 + LAG)


def test_ledger_knows_a_canary_until_another_act_has_ended_it() -> None:
    ledger = Ledger(lag=0)
    ledger.means("a/x", "one", 10.0).answered = 11.0
    ledger.means("a/x", "one", 20.0, canary="two").answered = 21.0
    assert (ledger.now("a/x"), ledger.canary("a/x")) == ("one", "two")
    assert not ledger.may_mean("a/x", "two", 18, 19)
    assert ledger.may_mean("a/x", "one", 22, 23)
    assert ledger.may_mean("a/x", "two", 22, 23)
    assert not ledger.may_mean("a/x", None, 22, 23)
    ledger.means("a/x", "one", 30.0).answered = 31.0
    assert ledger.may_mean("a/x", "two", 30, 32)  # the end was under way when it was asked
    assert not ledger.may_mean("a/x", "two", 32, 33)
    assert ledger.canary("a/x") is None
