"""A warning at the start that the directory of tenants has probably been lost: it is new, but the audit log or the
usage journal names tenants.

The server starts all the same: the operator may have meant to begin anew.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.tenant import ADMIN_CALLER, LOCAL_CALLER
from lora_serve.tenancy.audit.journal import AuditLine
from lora_serve.tenancy.audit.log import AuditLog
from lora_serve.tenancy.directory.directory import Directory
from lora_serve.tenancy.usage.metering import Meter

_WITHOUT_KEYS = (ADMIN_CALLER.tenant, LOCAL_CALLER.tenant)
_EVER = 2**40  # Unix seconds
_log = logging.getLogger(__name__)


async def warn_if_lost(directory: Directory, audit: AuditLog, meter: Meter) -> None:
    """Logs the warning, for a server whose clients need keys."""
    if directory.snapshot.position.epoch:
        return
    with suppress(AdapterUnavailableError, ValueError):  # it is for a warning that they are read
        found = {"audit log": await _is_audited(audit), "usage journal": await _is_metered(meter)}
        if tellers := " and the ".join(name for name, tells in found.items() if tells):
            _log.warning(
                "the tenant directory is new, but there were tenants, as the %s shows: if tenants.sqlite3 was lost, "
                "all their keys are answered with 401; stop the server and bring it back from a backup (`lora-serve "
                "registry restore`), or make tenants and keys anew",
                tellers,
            )


async def _is_audited(audit: AuditLog) -> bool:
    return bool((await audit.page(1, None, _made_tenant_or_key)).lines)


def _made_tenant_or_key(line: AuditLine) -> bool:
    act = line.act
    return str(act.get("action", "")).startswith("POST /admin/tenants") and 200 <= act.get("outcome", 0) < 300


async def _is_metered(meter: Meter) -> bool:
    rows, _ = await meter.rows(0, _EVER)
    return any(key.tenant not in _WITHOUT_KEYS for _, key, _ in rows)
