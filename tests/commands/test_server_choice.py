"""Which server a command changes: never one that nobody named among several, and each is named with its answer."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest

from lora_serve.core.process import RunningServer, _ticks, noted_server
from tests.commands.conftest import KEY, Adapters, Ended
from tests.commands.stub_server import StubServer, refusal


@pytest.fixture
async def second() -> AsyncIterator[StubServer]:
    async with StubServer() as server:
        yield server


def note_living(tmp_path: Path, pid: int, ticks: int, url: str) -> None:
    """A note as another server of this user leaves it; it counts while process `pid` began at `ticks`."""
    note = RunningServer(url, str(tmp_path / "store"), pid, 1.0, ticks)
    (tmp_path / "state" / "lora_serve" / "servers" / f"{pid}.json").write_text(json.dumps(asdict(note)))


CHANGES = [
    ("adapters", "upload", "acme/support", "FOLDER"),
    ("adapters", "register", "acme/support", "/srv/a"),
    ("adapters", "route", "acme/support", "3"),
    ("adapters", "delete", "acme/support", "--yes"),
    ("adapters", "evict", "acme/support"),
    ("tenants", "create", "acme"),
    ("tenants", "delete", "acme", "--yes"),
    ("keys", "create", "acme"),
    ("keys", "revoke", "acme", "k3yk3yk3yk3y"),
]


@pytest.mark.parametrize("words", CHANGES, ids=" ".join)
async def test_change_goes_to_none_of_several_servers_that_nobody_named(
    words: tuple[str, ...], program: Adapters, stub: StubServer, second: StubServer, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("{}")
    with noted_server(stub.url, tmp_path / "store"):
        note_living(tmp_path, os.getppid(), _ticks(os.getppid()), second.url)
        ended = await program(*(str(folder) if word == "FOLDER" else word for word in words))
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert all(word in ended.err for word in (stub.url, second.url, "--url", "LORA_SERVE_URL"))
    assert (stub.requests, second.requests) == ([], [])


async def test_a_look_names_the_one_of_several_that_it_asked(
    program: Adapters, stub: StubServer, second: StubServer, tmp_path: Path
) -> None:
    with noted_server(stub.url, tmp_path / "store"):
        note_living(tmp_path, os.getppid(), _ticks(os.getppid()), second.url)
        ended = await program("adapters", "show", "acme/support", "--json")
    assert (ended.code, ended.document["id"]) == (0, "acme/support")
    assert stub.url in ended.err
    assert second.requests == []


async def test_change_says_which_server_it_chose_and_a_dead_server_is_no_choice(
    program: Adapters, stub: StubServer, second: StubServer, tmp_path: Path
) -> None:
    with noted_server(stub.url, tmp_path / "store"):
        note_living(tmp_path, os.getppid(), 1, second.url)  # that process's number was given again
        ended = await program("adapters", "route", "acme/support", "3")
        asking = await program("adapters", "delete", "acme/support")
        looked = await program("adapters", "show", "acme/support")
    assert (ended.code, ended.out) == (0, "acme/support means version 3\n")
    assert ended.err == f"server: {stub.url}\n"
    assert (asking.code, stub.url in asking.err) == (1, True)  # where it asks whether to delete
    assert looked.err == ""
    assert second.requests == []


async def test_named_server_takes_the_change_while_others_run(
    program: Adapters, stub: StubServer, second: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with noted_server(stub.url, tmp_path / "store"):
        note_living(tmp_path, os.getppid(), _ticks(os.getppid()), second.url)
        ended = await program("adapters", "route", "acme/support", "3", "--url", second.url)
        monkeypatch.setenv("LORA_SERVE_URL", second.url)
        again = await program("adapters", "route", "acme/support", "2")
    assert (ended.code, ended.err, again.code, again.err) == (0, "", 0, "")
    assert (stub.requests, second.requests) == ([], ["PUT"] * 2)


async def test_refusal_names_the_server_that_said_no_and_the_one_that_was_not_asked(
    program: Adapters, stub: StubServer, second: StubServer
) -> None:
    urls = ("--url", stub.url, "--url", second.url)
    stub.replies.append(refusal(401, "The API key is not valid."))
    ended = await program("adapters", "route", "acme/support", "3", *urls)
    assert (ended.code, second.requests) == (1, [])
    left, said, _ = ended.err.splitlines()
    assert (second.url in left, "not asked" in left) == (True, True)
    assert said == f"lora-serve: error: {stub.url}: The API key is not valid."


async def test_with_several_servers_the_answer_tells_who_did_it(
    program: Adapters, stub: StubServer, second: StubServer
) -> None:
    urls = ("--url", stub.url, "--url", second.url)
    alone = await program("adapters", "route", "acme/support", "3", *urls)
    assert (alone.code, f"not asked: {second.url}" in alone.err) == (0, True)
    second.set_route("acme/support", 3)
    both = await program("adapters", "route", "acme/support", "3", "--wait", *urls)
    assert (both.code, both.err) == (0, f"{stub.url}: done\n{second.url}: done\n")
    second.replies.append(refusal(401, "The API key is not valid."))
    ended: Ended = await program("adapters", "route", "acme/support", "3", "--wait", *urls)
    assert (ended.code, KEY in ended.err) == (1, False)
    done, refused = ended.err.splitlines()[1:]
    assert (done, refused.startswith(f"{second.url}: The API key is not valid.")) == (f"{stub.url}: done", True)


async def test_each_of_several_replicas_gets_the_key_of_its_own_store(
    program: Adapters, stub: StubServer, second: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/how-to/replicas.md says; the variable would be sent to both."""
    monkeypatch.delenv("LORA_SERVE_ADMIN_KEY")
    for store in ("store", "other"):
        (tmp_path / store).mkdir()
        (tmp_path / store / "admin_key").write_text(f"key-of-{store}\n")
    second.set_route("acme/support", 3)
    with noted_server(second.url, tmp_path / "other"):
        note_living(tmp_path, os.getppid(), _ticks(os.getppid()), stub.url)
        urls = ("--url", stub.url, "--url", second.url)
        ended = await program("adapters", "route", "acme/support", "3", "--wait", *urls)
    assert ended.code == 0
    assert (set(stub.keys), set(second.keys)) == ({"Bearer key-of-store"}, {"Bearer key-of-other"})
