"""The tenants' budgets of device memory, sent to the engine at the start and whenever a quota changes anywhere."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from lora_serve.core.errors import LoraServeError
from lora_serve.core.messages import SetTenantBudgets, TenantBudget
from lora_serve.server.background.tasks import running
from lora_serve.server.services import SERVICES, Services

_RETRY = 1.0  # seconds until an engine that was not there is told again
_NONE = SetTenantBudgets(())
logger = logging.getLogger(__name__)


def budgets_of(services: Services) -> SetTenantBudgets:
    """The budgets that the directory has now."""
    tenants = services.keys.directory.snapshot.tenants
    limited = {name: t.quota for name, t in tenants.items() if t.quota.device_bytes_guaranteed is not None}
    limited |= {name: t.quota for name, t in tenants.items() if t.quota.device_bytes_max is not None}
    return SetTenantBudgets(
        tuple(
            TenantBudget(name, limited[name].device_bytes_guaranteed or 0, limited[name].device_bytes_max)
            for name in sorted(limited)
        )
    )


async def following_budgets(app: web.Application) -> AsyncIterator[None]:
    """Send budgets while the application runs."""
    async with running(functools.partial(_follow, app[SERVICES]), name="following tenants' budgets"):
        yield


async def _follow(services: Services) -> None:
    loop, changed, sent = asyncio.get_running_loop(), asyncio.Event(), _NONE

    def listener() -> None:
        loop.call_soon_threadsafe(changed.set)

    ledger = services.keys.directory.ledger
    ledger.listen(listener)
    changed.set()
    try:
        while True:
            await changed.wait()
            changed.clear()
            command = budgets_of(services)
            if command == sent:
                continue
            try:
                await services.client.adapters(command)
                sent = command
            except LoraServeError as error:  # no engine at present
                logger.debug("the engine could not be told the tenants' budgets: %s", error)
                await asyncio.sleep(_RETRY)
                changed.set()
    finally:
        ledger.unlisten(listener)
