"""route, canary, rollback, alias, aliases: what goes over the wire, and what is said."""

from __future__ import annotations

import pytest

from tests.commands.conftest import Adapters
from tests.commands.stub_server import StubServer


async def test_route_sets_the_version_and_takes_a_canary_away(ask_stub: Adapters, stub: StubServer) -> None:
    ended = await ask_stub("route", "acme/support", "3")
    assert (ended.code, ended.out) == (0, "acme/support means version 3\n")
    assert stub.bodies == [{"version": 3, "canary": None}]


async def test_route_with_a_canary(ask_stub: Adapters, stub: StubServer) -> None:
    ended = await ask_stub("route", "acme/support", "3", "--canary", "4=12.5")
    assert ended.out == "acme/support means version 3 (4: 12.5 %)\n"
    assert stub.bodies == [{"version": 3, "canary": {"version": 4, "percent": 12.5}}]


async def test_canary_keeps_the_default_version_and_nought_ends_it(ask_stub: Adapters, stub: StubServer) -> None:
    stub.set_route("acme/support", 2)
    assert (await ask_stub("canary", "acme/support", "4", "10")).out == "acme/support means version 2 (4: 10 %)\n"
    assert (await ask_stub("canary", "acme/support", "4", "0")).out == "acme/support means version 2\n"
    assert stub.bodies == [
        {"version": 2, "canary": {"version": 4, "percent": 10}},
        {"version": 2, "canary": None},
    ]


async def test_rollback_goes_to_the_version_before(ask_stub: Adapters, stub: StubServer) -> None:
    stub.set_route("acme/support", 2)
    stub.set_route("acme/support", 3)
    assert (await ask_stub("rollback", "acme/support")).out == "acme/support means version 2\n"
    assert (await ask_stub("rollback", "acme/support", "--json")).document["route"]["version"] == 1


async def test_aliases_are_made_listed_and_taken_away(ask_stub: Adapters, stub: StubServer) -> None:
    assert (await ask_stub("alias", "acme/live", "acme/support@3")).out == "acme/live means acme/support@3\n"
    assert stub.bodies == [{"target": "acme/support@3"}]
    lines = (await ask_stub("aliases")).out.splitlines()
    assert [line.split() for line in lines] == [["alias", "target"], ["acme/live", "acme/support@3"]]
    listed = (await ask_stub("aliases", "--json")).document
    assert listed == {"object": "list", "data": [{"alias": "acme/live", "target": "acme/support@3"}]}
    assert (await ask_stub("alias", "--delete", "acme/live")).out == "alias acme/live deleted\n"
    assert (await ask_stub("alias", "--delete", "acme/live")).code == 4


@pytest.mark.parametrize("arguments", [("acme/live",), ("--delete", "acme/live", "acme/support")])
async def test_an_alias_has_a_target_or_is_deleted(ask_stub: Adapters, arguments: tuple[str, ...]) -> None:
    ended = await ask_stub("alias", *arguments)
    assert ended.code == 2
    assert "TARGET" in ended.err
