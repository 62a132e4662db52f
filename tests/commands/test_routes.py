"""route, canary, rollback, alias, aliases, against the real application."""

from __future__ import annotations

from typing import Any

import pytest

from tests.commands.conftest import Adapters


@pytest.fixture
async def support(house: Any) -> str:
    """An id with three versions, of which it means the third."""
    for seed in (1, 2, 3):
        await house.register("acme/support", seed=seed)
    return "acme/support"


async def test_route_sets_the_version_and_takes_a_canary_away(ask: Adapters, support: str, house: Any) -> None:
    ended = await ask("route", support, "1", "--canary", "2=12.5")
    assert (ended.code, ended.out) == (0, "acme/support means version 1 (2: 12.5 %)\n")
    ended = await ask("route", support, "2")
    assert (ended.code, ended.out) == (0, "acme/support means version 2\n")
    assert house.services.catalog.entry(support).history == (3, 1)


async def test_canary_keeps_the_default_version_and_nought_ends_it(ask: Adapters, support: str) -> None:
    assert (await ask("canary", support, "1", "10")).out == "acme/support means version 3 (1: 10 %)\n"
    assert (await ask("canary", support, "1", "0")).out == "acme/support means version 3\n"


async def test_canary_of_no_version_is_refused_in_the_servers_words(ask: Adapters, support: str) -> None:
    ended = await ask("canary", support, "9", "10")
    assert (ended.code, "has no version 9; it has 1, 2, 3" in ended.err) == (1, True)


async def test_rollback_goes_to_the_version_before(ask: Adapters, support: str) -> None:
    assert (await ask("rollback", support)).out == "acme/support means version 2\n"
    assert (await ask("rollback", support, "--json")).document["route"]["version"] == 1
    ended = await ask("rollback", support)
    assert (ended.code, "no version to go back to" in ended.err) == (1, True)


async def test_registration_may_leave_the_route(ask: Adapters, support: str, house: Any) -> None:
    folder = house.make_adapter("new", seed=9)
    card = (await ask("register", support, str(folder), "--no-activate", "--json")).document
    assert (card["version"], card["versions"][-1]["version"]) == (3, 4)


async def test_aliases_are_made_listed_and_taken_away(ask: Adapters, support: str) -> None:
    assert (await ask("alias", "acme/live", f"{support}@3")).out == "acme/live means acme/support@3\n"
    lines = (await ask("aliases")).out.splitlines()
    assert [line.split() for line in lines] == [["alias", "target"], ["acme/live", "acme/support@3"]]
    listed = (await ask("aliases", "--json")).document
    assert listed == {"object": "list", "data": [{"alias": "acme/live", "target": "acme/support@3"}]}
    assert (await ask("alias", "--delete", "acme/live")).out == "alias acme/live deleted\n"
    assert (await ask("alias", "--delete", "acme/live")).code == 4


@pytest.mark.parametrize("arguments", [("acme/live",), ("--delete", "acme/live", "acme/support")])
async def test_an_alias_has_a_target_or_is_deleted(ask: Adapters, arguments: tuple[str, ...]) -> None:
    ended = await ask("alias", *arguments)
    assert ended.code == 2
    assert "TARGET" in ended.err
