"""lora-serve usage and lora-serve audit: tables and CSV for people, the server's JSON for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from yarl import URL

from lora_serve.server.services import Services
from lora_serve.tenancy.audit_journal import AuditJournal
from lora_serve.tenancy.audit_log import AuditLog
from lora_serve.tenancy.usage import UsageFigures, UsageKey
from tests.commands.conftest import Run
from tests.server.conftest import ADMIN


@pytest.fixture
async def services(services: Services) -> AsyncIterator[Services]:
    made = replace(services, audit=AuditLog(AuditJournal(services.adapter_config.store, "replica")))
    yield made
    await made.background.close()
    await made.audit.close()


def record(services: Services, tenant: str, requests: int) -> None:
    key = UsageKey(tenant, f"{tenant}/a", "1", "sha256:a", "k1")
    services.meter.record(
        key, UsageFigures(requests=requests, prompt_tokens=7, queue_seconds=0.5, residency_byte_seconds=490.659e6 / 2)
    )


async def test_usage_is_a_line_per_group(run: Run, house: Any) -> None:
    record(house.services, "acme", 2)
    record(house.services, "globex", 3)
    ended = await run("usage", "--by", "tenant")
    assert (ended.code, ended.err) == (0, "")
    head, *lines = ended.out.splitlines()
    assert head.split()[:2] == ["tenant", "requests"]
    assert [line.split()[:3] for line in lines] == [["acme", "2", "7"], ["globex", "3", "7"]]
    assert lines[0].split()[-8:] == ["500", "ms", "0", "ms", "0", "ms", "234.0", "MiB·s"]
    assert (await run("usage", "--tenant", "acme", "--json")).document["data"][0]["requests"] == 2


async def test_usage_as_csv(run: Run, house: Any) -> None:
    record(house.services, "acme", 2)
    (row,) = csv.DictReader(io.StringIO((await run("usage", "--csv")).out))
    assert (row["tenant"], row["adapter"], row["requests"], row["queue_seconds"]) == ("acme", "acme/a", "2", "0.5")


async def test_audit_is_a_line_per_act_newest_first(run: Run, house: Any) -> None:
    async with aiohttp.ClientSession(house.url, headers=ADMIN) as http:
        for name in ("acme", "globex"):
            async with http.post("/admin/tenants", json={"name": name}) as response:
                assert response.status == 201
    ended = await run("audit")
    assert (ended.code, ended.err) == (0, "")
    assert [line.split()[-3:] for line in ended.out.splitlines()[1:]] == [
        ["globex", "globex", "201"],
        ["acme", "acme", "201"],
    ]
    rows = list(csv.DictReader(io.StringIO((await run("audit", "--tenant", "acme", "--csv")).out)))
    assert [(row["action"], row["subject"]) for row in rows] == [("POST /admin/tenants", "acme")]
    ended = await run("audit", "--limit", "1")
    assert "there are more" in ended.err


async def test_what_a_tenant_named_is_no_formula_and_no_escape(run: Run, house: Any) -> None:
    async with (
        aiohttp.ClientSession(house.url, headers=ADMIN) as http,
        http.delete(URL(f"{house.url}/admin/adapters/%3DHYPERLINK(1)%1B%5D0;x", encoded=True)) as response,
    ):
        assert response.status == 404
    (row,) = csv.DictReader(io.StringIO((await run("audit", "--csv")).out))
    assert row["subject"] == "'=HYPERLINK(1)\\x1b]0;x"


@pytest.mark.parametrize("arguments", [("usage", "--by", "colour"), ("usage", "--from", "soon")])
async def test_what_the_server_refuses_is_said(run: Run, arguments: tuple[str, ...]) -> None:
    ended = await run(*arguments)
    assert ended.code != 0
    assert "`by`" in ended.err or "`from`" in ended.err


@pytest.mark.parametrize("command", ["usage", "audit"])
async def test_wrong_command_lines_are_two(run: Run, command: str) -> None:
    assert (await run(command, "--colour")).code == 2
    assert (await run(command, "surplus")).code == 2
