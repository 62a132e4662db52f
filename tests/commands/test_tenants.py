"""`lora-serve tenants` and `lora-serve keys` at the real application."""

from __future__ import annotations

import io
import re
from typing import Any

import aiohttp
import pytest

from tests.commands.conftest import Adapters, Run

SECRET = re.compile(r"ls-([a-z0-9]{12})-[A-Za-z0-9_-]{43}\n")


@pytest.fixture
def auth_required() -> bool:
    return True


async def test_tenant_lives_by_the_commands(run: Run) -> None:
    made = await run("tenants", "create", "acme", "--no-base", "--max-running", "4", "--max-stored-bytes", "10MiB")
    assert (made.code, made.out) == (0, "tenant acme created; it needs a key: lora-serve keys create acme\n")
    shown = (await run("tenants", "show", "acme", "--json")).document
    assert shown["quota"] == {"max_running": 4, "max_stored_bytes": 10 * 2**20}
    assert not shown["may_use_base"]
    assert shown["offload"]
    assert (await run("tenants", "set", "acme", "--no-offload")).code == 0
    assert not (await run("tenants", "show", "acme", "--json")).document["offload"]
    assert (await run("tenants", "set", "acme", "--base", "--max-running", "none", "--max-queued", "7")).code == 0
    assert (await run("tenants", "set", "acme", "--registrations-per-minute", "30")).code == 0
    shown = (await run("tenants", "show", "acme", "--json")).document
    assert shown["quota"].pop("registrations_per_minute") == 30
    assert (await run("tenants", "set", "acme", "--registrations-per-minute", "none")).code == 0
    shown = (await run("tenants", "show", "acme", "--json")).document
    assert (shown["may_use_base"], shown["quota"]) == (True, {"max_queued": 7, "max_stored_bytes": 10 * 2**20})
    table = (await run("tenants", "list")).out
    assert re.search(r"acme +yes +no +0 +0 .* max queued 7, max stored bytes 10485760", table)
    gone = await run("tenants", "delete", "acme", "--yes")
    assert gone.out == "tenant acme deleted, with 0 adapters\n"
    assert (await run("tenants", "list", "--json")).document["data"] == []
    assert (await run("tenants", "show", "acme")).code == 4


async def test_key_is_printed_once_and_works_until_it_is_revoked(run: Run, house: Any) -> None:
    await run("tenants", "create", "acme")
    made = await run("keys", "create", "acme", "--role", "tenant-admin", "--label", "ci", "--expires", "90d")
    match = SECRET.fullmatch(made.out)
    assert match is not None
    assert "not shown again" in made.err
    secret = made.out.strip()
    async with aiohttp.ClientSession(house.url, headers={"Authorization": f"Bearer {secret}"}) as http:
        async with http.get("/v1/models") as answer:
            assert answer.status == 200
        me = await run("keys", "whoami", "--admin-key", secret)
        assert me.out == f"tenant-admin of acme, key {match[1]}\n"
        own = await run("keys", "create", "acme", "--admin-key", secret, "--json")
        assert own.document["role"] == "inference"
        listed = await run("keys", "list", "acme")
        assert re.search(rf"{match[1]} +tenant-admin +ci +yes", listed.out)
        assert secret not in listed.out
        assert (await run("keys", "revoke", "acme", match[1])).out == f"key {match[1]} of acme revoked\n"
        async with http.get("/v1/models") as answer:
            assert answer.status == 401
    assert re.search(rf"{match[1]} +tenant-admin +ci +no", (await run("keys", "list", "acme")).out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tenants", "create", "a/b"), "tenant's name"),
        (("tenants", "create", "acme", "--max-running", "-1"), "--max-running"),
        (("tenants", "create", "acme", "--max-running", "many"), "such as 100"),
        (("tenants", "set", "acme"), "--base"),
        (("tenants", "create"), "NAME"),
        (("keys", "create", "acme", "--role", "root"), "--role"),
        (("keys", "create", "acme", "--expires", "soon"), "90d"),
        (("keys", "revoke", "acme", "ls-abc-def"), "not the whole secret"),
        (("adapters", "share", "acme/a"), "--all"),
        (("adapters", "share", "acme/a", "--all", "--nobody"), "--nobody"),
    ],
)
async def test_wrong_command_line_is_told_and_sends_nothing(run: Run, arguments: tuple[str, ...], said: str) -> None:
    ended = await run(*arguments)
    assert ended.code == 2
    assert said in ended.err
    assert ended.out == ""


async def test_tenant_is_not_deleted_unless_somebody_says_yes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await run("tenants", "create", "acme")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # no terminal: what comes from a pipe is no answer
    ended = await run("tenants", "delete", "acme")
    assert (ended.code, ended.out, "--yes" in ended.err) == (1, "", True)
    terminal = io.StringIO("n\ny\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    ended = await run("tenants", "delete", "acme")
    assert (ended.code, "[y/N]" in ended.err, "nothing was deleted" in ended.err) == (1, True, True)
    assert (await run("tenants", "delete", "acme")).out == "tenant acme deleted, with 0 adapters\n"


async def test_refusals_have_their_exit_codes(run: Run) -> None:
    await run("tenants", "create", "acme")
    assert (await run("tenants", "create", "acme")).code == 1
    assert (await run("tenants", "delete", "globex", "--yes")).code == 4
    assert (await run("keys", "list", "globex")).code == 4
    ended = await run("tenants", "list", "--admin-key", "wrong-key-altogether")
    assert (ended.code, "admin key" in ended.err) == (1, True)


async def test_adapter_is_shared_and_unshared(ask: Adapters, run: Run, house: Any) -> None:
    await house.register("acme/a")
    for tenant in ("initech", "globex"):
        await run("tenants", "create", tenant)
    unknown = await ask("share", "acme/a", "--with", "initech", "--with", "umbrella")
    assert (unknown.code, "make it first (lora-serve tenants create umbrella)" in unknown.err) == (1, True)
    assert "POST" not in unknown.err
    shared = await ask("share", "acme/a", "--with", "initech", "--with", "globex")
    assert shared.out == "acme/a is shared with globex, initech\n"
    shown = (await ask("show", "acme/a")).out
    assert re.search(r"shared with +globex, initech$", shown, re.MULTILINE)
    assert not re.search(r" $", shown, re.MULTILINE), "no line ends in blanks"
    assert shown.endswith("\n")
    assert (await ask("share", "acme/a", "--all")).out == "acme/a is shared with all tenants\n"
    assert (await ask("share", "acme/a", "--nobody", "--json")).document["shared_with"] == []


async def test_adapter_is_described_anew(ask: Adapters, house: Any) -> None:
    await house.register("acme/a")
    described = await ask("describe", "acme/a", '{"team": "a", "sampling": {"temperature": 0.5}}')
    assert described.out.splitlines() == [
        "acme/a has other metadata", "metadata:", '  team: "a"', '  sampling: {"temperature": 0.5}',
        "defaults of requests:", '  sampling: {"temperature": 0.5}',
    ]  # fmt: skip
    assert re.search(r'defaults +\{"sampling": \{"temperature": 0.5\}\}', (await ask("show", "acme/a")).out)
    wrong = await ask("describe", "acme/a", '{"sampling": {"temperature": 7}}')
    assert (wrong.code, "sampling.temperature" in wrong.err) == (1, True)
    merged = await ask("describe", "acme/a", "--merge", '{"team": null, "temperature": 1, "x": 2}', "--json")
    assert merged.document["metadata"] == {"sampling": {"temperature": 0.5}, "temperature": 1, "x": 2}
    assert merged.err == "warning: `temperature` in its metadata is a note: defaults stand in `sampling`.\n"
    none = (await ask("describe", "acme/a", "{}")).out.splitlines()
    assert none == ["acme/a has other metadata", "metadata: none", "defaults of requests: none"]
