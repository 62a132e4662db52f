"""lora-serve fleet status: a line per engine for people, the server's JSON for programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.core.stats import EngineStats, ReplicaState, merged
from tests.commands.conftest import Run
from tests.server.conftest import ADMIN
from tests.server.fleets import REPLICAS, play_fleet


async def test_one_engine_is_one_line_below_the_server_that_was_found(run: Run, house: Any) -> None:
    ended = await run("fleet", "status")
    assert (ended.code, ended.err) == (0, "")
    server, *table = ended.out.splitlines()
    assert server == f"server {house.url}"
    assert (await run("fleet", "status", "--url", house.url)).out.splitlines()[0].startswith("replica")
    head, line = table
    assert head.split()[:4] == ["replica", "node", "pid", "state"]
    assert line.split()[:4] == ["0", "localhost", "-", "ready"]  # a mock has no process


async def test_fleet_is_a_line_per_replica_with_its_adapters(run: Run, house: Any) -> None:
    home = await play_fleet(house)
    ended = await run("fleet", "status")
    assert (ended.code, ended.err) == (0, "")
    _, _, *lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines] == list(REPLICAS)
    for line in lines:
        assert line.endswith("  acme/all*, acme/one" if line.startswith(home) else "  acme/all*")
        assert ("2/4" in line.split()) == line.startswith(home)


async def test_where_an_adapter_lives(run: Run, house: Any) -> None:
    home = await play_fleet(house)
    *_, line = (await run("fleet", "status", "--adapter", "acme/one")).out.splitlines()
    assert line.split() == ["acme/one", "1", home, "host,", "device", "0"]
    lines = (await run("fleet", "status", "--adapter", "acme/all")).out.splitlines()[-3:]
    assert [line.split()[2] for line in lines] == list(REPLICAS)
    assert all("(pinned)" in line for line in lines)
    assert "acme/none is on no replica" in (await run("fleet", "status", "--adapter", "acme/none")).out
    digest = house.services.catalog.entry("acme/one").default.digest
    *_, line = (await run("fleet", "status", "--adapter", digest)).out.splitlines()
    assert line.split()[:2] == [digest, home]


async def test_card_of_an_adapter_names_its_replicas(run: Run, house: Any) -> None:
    home = await play_fleet(house)
    lines = (await run("adapters", "show", "acme/one")).out.splitlines()
    assert ["replicas", home, "(host,", "device)"] in [line.split() for line in lines]
    assert ["replicas", "-"] in [line.split() for line in (await run("adapters", "show", "acme/none")).out.splitlines()]


async def test_unknown_adapter_is_said_in_words(run: Run) -> None:
    ended = await run("fleet", "status", "--adapter", "acme/nobody")
    assert ended.code != 0
    assert "acme/nobody" in ended.err
    assert "Traceback" not in ended.err


async def test_json_is_what_the_server_sent(run: Run, house: Any) -> None:
    await play_fleet(house)
    async with aiohttp.ClientSession(house.url, headers=ADMIN) as http, http.get("/admin/fleet") as answer:
        document = await answer.json()
    assert (await run("fleet", "status", "--json")).document == document


async def test_what_is_wrong_with_a_replica_is_told(run: Run, house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await play_fleet(house)
    first, second, *others = (await house.engine.stats()).replicas
    second = replace(second, stats=replace(second.stats, pid=4711))
    refused = replace(first, state=ReplicaState.REFUSED, reason="another base\x1b[31m model", stats=None)

    async def stats() -> EngineStats:
        return merged([refused, second, *others], num_lost=2)

    monkeypatch.setattr(house.engine, "stats", stats)
    ended = await run("fleet", "status")
    assert "r-a is refused: another base\\x1b[31m model" in ended.err
    assert "replaced since the server's start: 2" in ended.err
    assert ended.out.splitlines()[2].split()[2:4] == ["-", "refused"]
    assert ended.out.splitlines()[3].split()[2] == "4711"


async def test_fleet_without_a_replica_is_said(run: Run, house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stats() -> EngineStats:
        return merged([])

    monkeypatch.setattr(house.engine, "stats", stats)
    assert (await run("fleet", "status", "--url", house.url)).out == "no replica is there\n"
