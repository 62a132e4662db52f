"""list and show: tables for people, the server's JSON for programs."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lora_serve.commands import verb
from tests.commands.conftest import Adapters
from tests.commands.stub_server import StubServer, make_card
from tests.server.conftest import ADMIN


async def test_list_shows_a_line_per_adapter(ask: Adapters, house: Any) -> None:
    await house.register("acme/a", seed=1)
    await house.register("globex/b", seed=2)
    ended = await ask("list")
    assert (ended.code, ended.err) == (0, "")
    head, *lines = ended.out.splitlines()
    assert head.split() == ["id", "version", "rank", "size", "state", "tiers", "hits", "misses", "pinned"]
    assert [line.split()[:3] for line in lines] == [["acme/a", "1", "2"], ["globex/b", "1", "2"]]
    assert "\x1b" not in ended.out


async def test_list_asks_for_tenant_and_state(ask: Adapters, house: Any) -> None:
    await house.register("acme/a", seed=1)
    await house.register("globex/b", seed=2)
    assert [card["id"] for card in (await ask("list", "--tenant", "globex", "--json")).document["data"]] == ["globex/b"]
    assert (await ask("list", "--state", "on_device", "--json")).document["data"] == []


async def test_json_is_what_the_server_sent(ask: Adapters, house: Any) -> None:
    await house.register("acme/a")
    async with aiohttp.ClientSession(headers=ADMIN) as session:
        async with session.get(f"{house.url}/admin/adapters") as answer:
            listed = await answer.json()
        async with session.get(f"{house.url}/admin/adapters/acme/a") as answer:
            card = await answer.json()
    assert (await ask("list", "--json")).document == listed
    assert (await ask("show", "acme/a", "--json")).document == card


async def test_pages_are_followed_to_the_limit_or_to_the_end(
    ask: Adapters, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "MAX_PAGE", 2)
    names = [f"acme/a{number}" for number in range(5)]
    for number, name in enumerate(names):
        await house.register(name, seed=number)
    everything = (await ask("list", "--all", "--json")).document
    assert [card["id"] for card in everything["data"]] == names
    assert (everything["has_more"], everything["last_id"]) == (False, names[-1])
    three = await ask("list", "--limit", "3")
    assert [line.split()[0] for line in three.out.splitlines()[1:]] == names[:3]
    assert three.err == f"there are more: --all, or --after {names[2]}\n"
    rest = (await ask("list", "--after", names[2], "--json")).document
    assert [card["id"] for card in rest["data"]] == names[3:]


async def test_show_prints_the_card_and_its_versions(ask: Adapters, house: Any) -> None:
    first = await house.register("acme/a", seed=1, metadata={"run": 17})
    second = await house.register("acme/a", seed=2)
    ended = await ask("show", "acme/a")
    assert ended.code == 0
    for text in (first.digest, second.digest, '{"run": 17}', "q_proj", "plain LoRA", "evictions"):
        assert text in ended.out, text


async def test_show_prints_what_it_has_no_name_for(ask_stub: Adapters, stub: StubServer) -> None:
    """A newer server's facts are not hidden."""
    stub.cards["acme/support"]["eviction_reasons"] = {"device": {"budget": 3}}
    out = (await ask_stub("show", "acme/support")).out
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "fetch 1.5, verify 0.25, parse 2, copy 0.5" in rows["last load"]
    assert "device (budget 3)" in rows["eviction reasons"]


async def test_a_servers_words_cannot_steer_the_terminal(ask_stub: Adapters, stub: StubServer) -> None:
    stub.cards["acme/support"] |= {"warnings": ["\x1b]0;title\x07 [bold]x[/bold]"], "note": "a\x1b[2Jb"}
    out = (await ask_stub("show", "acme/support")).out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]x[/bold]" in out


async def test_colours_stay_off_in_a_pipe_whatever_the_environment_says(
    ask_stub: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in (await ask_stub("show", "acme/support")).out


async def test_an_empty_list_is_a_head_line_and_no_error(ask: Adapters) -> None:
    ended = await ask("list")
    assert (ended.code, ended.out.count("\n")) == (0, 1)


async def test_a_canary_is_seen_in_both(ask_stub: Adapters, stub: StubServer) -> None:
    card = make_card(version=3)
    card["route"] = {"version": 3, "canary": {"version": 4, "percent": 10}, "history": [1, 2]}
    card["aliases"] = ["acme/live"]
    stub.cards["acme/support"] = card
    out = (await ask_stub("show", "acme/support")).out
    assert "3 (4: 10 %)" in out
    assert "1, 2" in out
    assert "acme/live" in out
    stub.replies.append(
        web.json_response({"object": "list", "data": [card], "has_more": False, "last_id": "acme/support"})
    )
    assert "3 (4: 10 %)" in (await ask_stub("list")).out
