"""The application with its books: limits on a clock that stands still, usage and the audit log in files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.core.tenant import NO_LIMITS, Quota, Role
from lora_serve.server.services import Services
from lora_serve.tenancy.audit_journal import AuditJournal
from lora_serve.tenancy.audit_log import AuditLog
from lora_serve.tenancy.metering import Meter
from lora_serve.tenancy.quotas import Quotas
from lora_serve.tenancy.usage import UsageJournal
from tests.tenancy.limited import Clock, limiter

NewKey = Callable[..., str]


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def services(services: Services, clock: Clock) -> AsyncIterator[Services]:
    store, services.keys.directory.clock = services.adapter_config.store, clock
    made = replace(
        services,
        quotas=Quotas(limiter(clock)),
        meter=Meter(UsageJournal(store), clock=clock),
        audit=AuditLog(AuditJournal(store, "replica", clock)),
    )
    yield made
    await made.background.close()
    await made.quotas.close()
    await made.meter.close()
    await made.audit.close()


@pytest.fixture
def new_key(services: Services) -> NewKey:
    """new_key("acme", quota=..., key_quota=..., role=...) -> a secret; the tenant is made if it is not there."""

    def make(
        tenant: str, quota: Quota = NO_LIMITS, key_quota: Quota = NO_LIMITS, role: Role = Role.INFERENCE, **more: Any
    ) -> str:
        directory = services.keys.directory
        if tenant not in directory.snapshot.tenants:
            directory.create_tenant(tenant, quota)
        return directory.create_key(tenant, role, quota=key_quota, **more)[1]

    return make


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def complete(http: aiohttp.ClientSession, secret: str, **body: Any) -> aiohttp.ClientResponse:
    """A completion of four prompt tokens and at most two more, as it was answered."""
    given = {"model": "tiny-base", "prompt": [1, 2, 3, 4], "max_tokens": 2, **body}
    async with http.post("/v1/completions", json=given, headers=bearer(secret)) as response:
        await response.read()
        return response
