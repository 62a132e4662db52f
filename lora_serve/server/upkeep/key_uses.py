"""The times of keys' last uses, written to the directory in batches and never by a request."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.server.background.tasks import running
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.authentication.authenticator import KeyTable

INTERVAL = 30.0  # seconds; what a crash forgets
logger = logging.getLogger(__name__)


async def noting_uses(app: web.Application) -> AsyncIterator[None]:
    """Write the uses while the application runs, and once more at its end."""
    keys = app[SERVICES].keys
    async with running(functools.partial(_keep, keys), name="noting keys' uses"):
        yield
    await write_uses(keys)


async def write_uses(keys: KeyTable) -> None:
    """Write all uses in one commit; if that fails, keep them for the next."""
    uses = keys.take_uses()
    if not uses:
        return
    try:
        await asyncio.to_thread(keys.directory.note_uses, uses)
    except AdapterUnavailableError as error:
        logger.warning("the last uses of %d keys could not be noted: %s", len(uses), error)
        keys.give_back(uses)


async def _keep(keys: KeyTable) -> None:
    while True:
        await asyncio.sleep(INTERVAL)
        await write_uses(keys)
