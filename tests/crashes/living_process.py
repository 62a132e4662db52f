"""A process that opens the store as the server does, acts on it, and dies at a chosen point of `crash_points.c`, which
is preloaded. Imported once, forked for every life.

Arguments: a model spec as JSON, folders with the contents. Each line on standard input is one life, an `Order` as JSON.
It prints "refused <words>" or "ready <blobs aside> <points> <digest of the admin key>", then "<status> <points> <secret
of a new key>" for each act once it is acknowledged, "state <JSON>" if asked, and "ended <exit status>" at last.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog import ledger
from lora_serve.adapters.storage import AdapterStorage, open_storage
from lora_serve.app.warm_set import FILE_NAME as HOT_NAME
from lora_serve.app.warm_set import WarmSet, read_warm_set, write_warm_set
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, AuthenticationError, ConfigError, NotFoundError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.core.tenant import Role
from lora_serve.tenancy.accounting import Accounting, open_accounting
from lora_serve.tenancy.admin_key import load_admin_key
from lora_serve.tenancy.audit_journal import Act
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.directory import Directory, open_directory
from lora_serve.tenancy.usage import UsageFigures, UsageKey, UsageRow
from tests.adapters.registration.registering_process import Verifier, say, spec_from
from tests.crashes.crashing import Order, Points
from tests.stateful.history_process import Life, state_of, wait_for_redis
from tests.verifying_registry import VerifyingRegistry

EVER = 2**40


class WholeLife(Life):
    """One open store. Each act is a method of its name."""

    def __init__(
        self,
        registry: VerifyingRegistry,
        storage: AdapterStorage,
        directory: Directory,
        books: Accounting,
        order: Order,
        folders: Sequence[str],
    ) -> None:
        super().__init__(registry, storage.catalog, folders)
        self._storage = storage
        self._directory = directory
        self._books = books
        self._store = Path(order.store)
        self.secrets = list(order.secrets)

    async def noted(self, name: str, *arguments: Any) -> int:
        """The act, and its line in the audit log, as the web does both."""
        try:
            status = self.act(name, *arguments)
        except NotFoundError:
            status = 404
        except AdapterUnavailableError:
            status = 503
        if name == "use_key":
            return status
        act = Act("admin", "admin", "admin", name, json.dumps(arguments), "", "", status, "")
        await self._books.audit.append(act)
        return status

    async def meter(self, tenant: str, tokens: int) -> int:
        """Counted once it is flushed."""
        self._books.meter.record(UsageKey(tenant, "a", "1", "sha256:0"), UsageFigures(1, tokens))
        await self._books.meter.flush()
        return 200

    def create_tenant(self, tenant: str) -> int:
        self._directory.create_tenant(tenant)
        return 201

    def delete_tenant(self, tenant: str) -> int:
        was_there = self._directory.delete_tenant(tenant)
        removal = self._catalog.remove_tenant(tenant)
        self._free(removal.strays)
        self._catalog.ledger.forget()
        self._directory.ledger.forget()
        return 200 if was_there or removal.names else 404

    def create_key(self, tenant: str) -> int:
        _, secret = self._directory.create_key(tenant, Role.INFERENCE)
        self.secrets.append(secret)
        return 201

    def revoke_key(self, number: int, tenant: str) -> int:
        self._directory.revoke_key(tenant, self.secrets[number].split("-")[1])
        return 200

    def use_key(self, number: int) -> int:
        self._directory.note_uses({self.secrets[number].split("-")[1]: self._directory.clock()})
        return 200

    def note_hot(self) -> int:
        write_warm_set(self._store / HOT_NAME, WarmSet(tuple(sorted(self._catalog.snapshot.digests))))
        return 200

    async def state(self) -> dict[str, Any]:
        """All that is known, and every file below the store."""
        found = state_of(self._catalog, self._storage.store)
        rows, _ = await self._books.meter.rows(0, EVER)
        page = await self._books.audit.page(10_000, None, lambda line: True)
        keys, directory = KeyTable(self._directory), self._directory.snapshot
        journal, usage = self._books.audit._journal, self._books.meter._journal
        assert journal is not None
        assert usage is not None
        return {
            **found,
            "tenants": sorted(directory.tenants),
            "keys": [_opens(keys, secret) for secret in self.secrets],
            "num_keys": sum(key.is_valid(0) for key in directory.keys.values()),
            "own_audit": [[line.act["action"], line.act["subject"], line.act["outcome"]] for line in journal.lines()],
            "broken": next(journal.broken(), None),
            "num_lines": len(page.lines),
            "usage": _sums(usage.rows(0, EVER)),
            "all_usage": _sums(rows),
            "hot": list(read_warm_set(self._store / HOT_NAME).device),
            "held": sorted(self._catalog.ledger.state.leases),
            "kept": sorted(self._storage.store.digests()),
            "files": sorted(str(path.relative_to(self._store)) for path in self._store.rglob("*")),
        }


def _sums(rows: Sequence[UsageRow]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for _, key, figures in rows:
        sums[key.tenant] += figures.prompt_tokens
    return +sums


def _opens(keys: KeyTable, secret: str) -> str:
    """The tenant that the secret opens for; "" none."""
    with suppress(AuthenticationError):
        return keys.caller(secret).tenant
    return ""


async def live(spec: ModelSpec, folders: Sequence[str], order: Order, points: Points) -> None:
    config = AdapterConfig(
        store=Path(order.store),
        redis_url=order.url or None,
        max_loras=4,
        max_lora_rank=64,
        adapter_host_memory=10**8,
        max_upload_size=10**7,
    )
    async with AsyncExitStack() as stack:
        storage = stack.enter_context(open_storage(config))
        directory = stack.enter_context(open_directory(config))
        opening = open_accounting(config, AccountingConfig(), replica=storage.catalog.replica)
        books = await stack.enter_async_context(opening)
        admin_key = load_admin_key(None, config.store)
        registry = VerifyingRegistry(config, spec, storage.catalog, storage.store, Verifier())
        registry.sweep()
        say(f"ready {len(list(storage.disk.orphans.all()))} {points.passed} {admin_key.digest.hex()}")
        life = WholeLife(registry, storage, directory, books, order, folders)
        for number, (name, *arguments) in enumerate(order.acts):
            before = points.passed
            if order.kill and order.kill[0] == number:
                points.kill_in(order.kill[1])
            known = len(life.secrets)
            status = await (life.meter(*arguments) if name == "meter" else life.noted(name, *arguments))
            say(" ".join([str(status), str(points.passed - before), *life.secrets[known:]]))
            if status == order.ends_at:
                os._exit(0)
        if order.kill and order.kill[0] == len(order.acts):
            points.kill_in(order.kill[1])
        if order.tells:
            say("state " + json.dumps(await life.state()))


def begun(order: Order) -> Points:
    """From now on this process counts."""
    points = Points(Path(order.points))
    points.begin(kill_in=order.kill[1] if order.kill and order.kill[0] < 0 else 0, counts_sockets=bool(order.url))
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.crash_begin(*(text.encode() for text in (order.points, order.root, order.notes)))
    return points


def run(spec: ModelSpec, folders: Sequence[str], order: Order) -> None:
    try:
        asyncio.run(live(spec, folders, order, begun(order)))
    except ConfigError as error:
        say("refused " + str(error).replace("\n", " "))


def fork_for_each(run: Callable[[Order], None]) -> None:
    """A life for each order on standard input."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run(Order(**json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


def main(spec: str, *folders: str) -> None:
    wait_for_redis()
    ledger._LONGEST_WAIT = 0.1
    fork_for_each(lambda order: run(spec_from(spec), folders, order))


if __name__ == "__main__":
    main(*sys.argv[1:])
