"""A directory of tenants that was lost is told of at the start; a new store's is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lora_serve.core.config import AdapterConfig
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.tenancy.accounting import open_accounting, warn_if_lost
from lora_serve.tenancy.audit_journal import Act
from lora_serve.tenancy.directory import open_directory
from lora_serve.tenancy.usage import UsageFigures, UsageKey


@pytest.fixture
def config(tmp_path: Path) -> AdapterConfig:
    (tmp_path / "store").mkdir()
    return AdapterConfig(
        store=tmp_path / "store", max_loras=4, max_lora_rank=64, adapter_host_memory=10**8, max_upload_size=10**7
    )


async def start(config: AdapterConfig, acts: tuple[str, ...] = (), tenants: tuple[str, ...] = ()) -> None:
    """`acts` and `tenants`: what it is asked to do, and by whom it is used, after that."""
    async with open_accounting(config, AccountingConfig()) as books:
        with open_directory(config) as directory:
            await warn_if_lost(directory, books.audit, books.meter)
        for act in acts:
            await books.audit.append(Act("admin", "admin", "admin", act, "acme", "acme", "", 201, "r"))
        for tenant in tenants:
            books.meter.record(UsageKey(tenant, "a", "1", "sha256:a"), UsageFigures(requests=1))
        books.meter.record(UsageKey("acme", "a", "1", "d"), UsageFigures(residency_byte_seconds=1.0))  # without a key
        await books.meter.flush()


@pytest.mark.parametrize(
    ("acts", "tenants", "teller"),
    [
        (("POST /admin/tenants",), (), "audit log shows"),
        (("POST /admin/tenants/{tenant}/keys",), ("acme",), "audit log and the usage journal shows"),
        ((), ("acme",), "usage journal shows"),
        (("PUT /admin/adapters/{id}",), ("default", "admin"), ""),
        ((), (), ""),
    ],
)
def test_lost_directory_is_told_of_where_something_tells_of_tenants(
    config: AdapterConfig,
    acts: tuple[str, ...],
    tenants: tuple[str, ...],
    teller: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(start(config, acts, tenants))
    with open_directory(config) as directory:
        if teller:
            directory.create_tenant("acme")
    assert "registry restore" not in caplog.text
    asyncio.run(start(config))
    assert "registry restore" not in caplog.text
    for path in config.store.glob("tenants.sqlite3*"):
        path.unlink()
    asyncio.run(start(config))
    assert ("registry restore" in caplog.text) == bool(teller)
    assert teller in caplog.text
