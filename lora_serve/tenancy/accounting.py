"""Opens what counts and notes: limits per minute, usage, the audit log; of this server, or shared by replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from itertools import islice

from lora_serve.adapters.catalog.opening import replica_name
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.core.tenant import ADMIN_CALLER, LOCAL_CALLER
from lora_serve.tenancy.audit_journal import AuditJournal, AuditLine
from lora_serve.tenancy.audit_log import AuditLog
from lora_serve.tenancy.directory import Directory
from lora_serve.tenancy.metering import Meter
from lora_serve.tenancy.quotas import Quotas
from lora_serve.tenancy.rate_limiter import RateCounters, RateLimiter, SharedCounters
from lora_serve.tenancy.usage import UsageJournal

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accounting:
    """Quotas, usage and the audit log, as the web uses them."""

    quotas: Quotas
    meter: Meter
    audit: AuditLog


@asynccontextmanager
async def open_accounting(
    config: AdapterConfig,
    accounting: AccountingConfig,
    monitor: StoreMonitor | None = None,
    replica: str | None = None,
) -> AsyncIterator[Accounting]:
    """For as long as the block lasts; the caller holds the store. What is left is written at its end.

    `monitor`: opens for writing later what can only be read now. `replica`: this server's name; None: as the store has
    it. Raises ConfigError.
    """
    replica = replica or replica_name(config.store)
    with ExitStack() as opened:
        audit = opened.enter_context(closing(AuditJournal(config.store, replica, monitor=monitor)))
        usage = opened.enter_context(closing(UsageJournal(config.store, monitor)))
        books = _opened(config, accounting, replica, usage, audit)
        broken = await asyncio.to_thread(lambda: list(islice(audit.broken(), 10)))
        opened.pop_all()  # from here on `books` close them
    if broken:
        numbers = ", ".join(map(str, broken))
        _log.error("audit log: line %s does not follow from the one before it: lines were changed or removed", numbers)
    books.audit.publish()  # what a crash, or Redis' absence, kept from the others
    try:
        yield books
    finally:
        await books.quotas.close()
        await books.meter.close()
        await books.audit.close()


def _opened(
    config: AdapterConfig, accounting: AccountingConfig, replica: str, usage: UsageJournal, audit: AuditJournal
) -> Accounting:
    if config.redis_url is None:
        return Accounting(Quotas(), Meter(usage, None, accounting), AuditLog(audit))
    from lora_serve.tenancy.shared import AuditExchange, RedisCounters, UsageExchange

    url, prefix = config.redis_url, config.redis_prefix
    counters: RateCounters = RedisCounters(url, prefix)
    limiter = RateLimiter(SharedCounters(counters, accounting.quota_without_redis == "local"))
    meter = Meter(usage, UsageExchange(url, prefix, replica, accounting.usage_keep_days), accounting)
    return Accounting(Quotas(limiter), meter, AuditLog(audit, AuditExchange(url, prefix, replica)))


_WITHOUT_KEYS = (ADMIN_CALLER.tenant, LOCAL_CALLER.tenant)
_EVER = 2**40  # Unix seconds


async def warn_if_lost(directory: Directory, audit: AuditLog, meter: Meter) -> None:
    """Logs the warning, for a server whose clients need keys."""
    if directory.snapshot.position.epoch:
        return
    with suppress(AdapterUnavailableError, ValueError):  # it is for a warning that they are read
        found = {"audit log": await _is_audited(audit), "usage journal": await _is_metered(meter)}
        if sources := " and the ".join(name for name, has_tenants in found.items() if has_tenants):
            _log.warning(
                "the tenant directory is new, but there were tenants, as the %s shows: if tenants.sqlite3 was lost, "
                "all their keys are answered with 401; stop the server and bring it back from a backup (`lora-serve "
                "registry restore`), or make tenants and keys anew",
                sources,
            )


async def _is_audited(audit: AuditLog) -> bool:
    return bool((await audit.page(1, None, _made_tenant_or_key)).lines)


def _made_tenant_or_key(line: AuditLine) -> bool:
    act = line.act
    return str(act.get("action", "")).startswith("POST /admin/tenants") and 200 <= act.get("outcome", 0) < 300


async def _is_metered(meter: Meter) -> bool:
    rows, _ = await meter.rows(0, _EVER)
    return any(key.tenant not in _WITHOUT_KEYS and figures.requests for _, key, figures in rows)
