"""Wrong keys and admin acts, too many within a minute: 429 and when to come back."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lora_serve.core.config import ServerConfig
from lora_serve.core.setting_groups.http import AccessLimits
from lora_serve.core.settings import load_settings
from lora_serve.core.tenant import Role
from lora_serve.tenancy.audit_journal import AuditJournal
from lora_serve.tenancy.audit_log import MAX_REFUSED, AuditLog
from tests.server.conftest import ADMIN
from tests.server.tenants import tenancy_of

WRONG = {"Authorization": "Bearer not-a-key-of-this-server"}
LIMITS = AccessLimits(wrong_keys_per_minute=5, admin_acts_per_minute=10, tenant_acts_per_minute=3)


@pytest.fixture
def server_config(server_config: ServerConfig) -> ServerConfig:
    return replace(server_config, **asdict(LIMITS))


@pytest.fixture
def auth_required() -> bool:
    return True


async def statuses(session: aiohttp.ClientSession, count: int, path: str, headers: dict[str, str]) -> list[int]:
    found = []
    for _ in range(count):
        async with session.get(path, headers=headers) as answer:
            found.append(answer.status)
    return found


@pytest.mark.parametrize(("path", "first"), [("/admin/adapters", 401), ("/v1/models", 401), ("/metrics", 200)])
async def test_wrong_keys_beyond_the_limit_are_429_wherever_they_are_tried(
    http: aiohttp.ClientSession, path: str, first: int
) -> None:
    assert await statuses(http, 30, path, WRONG) == [first] * 5 + [429] * 25
    async with http.get(path, headers=WRONG) as answer:
        error = (await answer.json())["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "rate_limit_error")
        assert 1 <= int(answer.headers["Retry-After"]) <= 120


async def test_each_wrong_key_of_a_request_counts(http: aiohttp.ClientSession) -> None:
    assert await statuses(http, 4, "/v1/models", {**WRONG, "x-api-key": "nor-this"}) == [401] * 2 + [429] * 2


async def test_right_key_from_the_same_address_is_served(http: aiohttp.ClientSession) -> None:
    assert (await statuses(http, 30, "/v1/models", WRONG))[-1] == 429
    assert await statuses(http, 10, "/v1/models", ADMIN) == [200] * 10
    assert await statuses(http, 3, "/v1/models", {}) == [401] * 3, "no key is no guess"
    assert await statuses(http, 3, "/health", WRONG) == [200] * 3


async def test_flood_of_wrong_keys_leaves_few_lines(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lora_serve"):
        await statuses(http, 50, "/admin/adapters", WRONG)
    lines = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert len(lines) == 5 + 1
    assert "not-a-key" not in caplog.text


async def test_acts_beyond_the_limit_are_429_and_reads_are_not_counted(admin: aiohttp.ClientSession) -> None:
    for _ in range(10):
        async with admin.delete("/admin/adapters/nobody") as answer:
            assert answer.status == 404
        assert await statuses(admin, 2, "/admin/adapters", {}) == [200] * 2
    for call in (admin.delete("/v1/models/nobody"), admin.post("/v1/load_lora_adapter"), admin.put("/admin/engine")):
        async with call as answer:
            assert answer.status == 429
            assert 1 <= int(answer.headers["Retry-After"]) <= 120
            limits = [answer.headers[f"x-ratelimit-{figure}-acts"] for figure in ("limit", "remaining")]
            assert limits == ["10", "0"]
            assert "acts per minute: limit 10" in (await answer.json())["error"]["message"]
    assert await statuses(admin, 2, "/admin/adapters", {}) == [200] * 2


async def test_act_that_is_refused_does_nothing(admin: aiohttp.ClientSession, house: Any) -> None:
    for _ in range(10):
        await admin.delete("/admin/adapters/nobody")
    async with admin.post("/admin/tenants", json={"name": "acme"}) as answer:
        assert answer.status == 429
    assert "acme" not in house.services.keys.directory.snapshot.tenants


async def test_tenants_admins_have_a_limit_of_their_own(house: Any) -> None:
    async with tenancy_of(house) as tenancy:
        for name in ("acme", "globex"):
            await tenancy.tenant(name)
        for key in ("acme+", "globex+"):
            found = [(await tenancy.call(key, "DELETE", "/admin/adapters/nobody")).status for _ in range(5)]
            assert found == [404] * 3 + [429] * 2


async def test_refused_acts_of_an_admin_do_not_fill_the_audit_log(
    admin: aiohttp.ClientSession, services: Any, tmp_path: Path
) -> None:
    journal = AuditJournal(tmp_path / "store", "here")
    object.__setattr__(services, "audit", AuditLog(journal))  # it is frozen
    for _ in range(MAX_REFUSED + 40):
        async with admin.delete("/admin/adapters/nobody"):
            pass
    assert len(journal.lines()) == 10 + MAX_REFUSED
    journal.close()


def test_limits_are_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = ["--wrong-keys-per-minute", "1", "--admin-acts-per-minute", "2", "--tenant-acts-per-minute", "0"]
    attempts = load_settings(["--model", str(tmp_path), *flags]).part(AccessLimits)
    assert attempts == AccessLimits(wrong_keys_per_minute=1, admin_acts_per_minute=2, tenant_acts_per_minute=0)
    assert [attempts.acts_of(role) for role in (Role.ADMIN, Role.TENANT_ADMIN)] == [2, 0]
    assert load_settings(["--model", str(tmp_path)]).part(AccessLimits) == AccessLimits()
