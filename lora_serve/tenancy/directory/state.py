"""Tenants and keys at one moment: immutable, so that any thread may read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.core.errors import NotFoundError
from lora_serve.core.tenant import ApiKey, Tenant
from lora_serve.tenancy.directory.documents import document_of, key_of, tenant_of, times_of

TENANT, KEY, USED = "tenant:", "key:", "used:"


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """Records by name or id. A key without its tenant is as good as none."""

    position: Position = field(default_factory=Position)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    used: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # bucket -> key id -> Unix seconds

    def after(self, page: Page) -> DirectoryState:
        """The state after these records have changed. One that cannot be read is left out: it must open nothing."""
        tenants, keys, used = dict(self.tenants), dict(self.keys), dict(self.used)
        for name, text in page.records.items():
            if name.startswith(TENANT):
                _put(tenants, name.removeprefix(TENANT), text, tenant_of)
            elif name.startswith(KEY):
                _put(keys, name.removeprefix(KEY), text, key_of)
            elif name.startswith(USED):
                _put(used, name.removeprefix(USED), text, lambda _, text: times_of(text))
        return DirectoryState(page.position, tenants, keys, used)

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name. Raises NotFoundError."""
        found = self.tenants.get(name)
        if found is None:
            raise NotFoundError(name)
        return found

    def key(self, tenant: str, key_id: str) -> ApiKey:
        """The tenant's key of that id. Raises NotFoundError, for another tenant's key too."""
        found = self.keys.get(key_id)
        if found is None or found.tenant != tenant:
            raise NotFoundError(key_id, "key")
        return found

    def keys_of(self, tenant: str) -> tuple[ApiKey, ...]:
        """The tenant's keys, the oldest first."""
        return tuple(sorted((k for k in self.keys.values() if k.tenant == tenant), key=lambda k: (k.created, k.id)))

    def last_used(self, key_id: str) -> float | None:
        """The last use that was written down; None: never used, or not written yet."""
        return self.used.get(bucket_of(key_id), {}).get(key_id)


def bucket_of(key_id: str) -> str:
    """The record that holds the key's last use: a few records for many keys keep a journal's list of changes short."""
    return key_id[:1]


def saved(record: Tenant | ApiKey) -> Changes:
    """The change that writes a record."""
    name = TENANT + record.name if isinstance(record, Tenant) else KEY + record.id
    return {name: document_of(record)}


def saved_uses(state: DirectoryState, uses: Mapping[str, float], gone: frozenset[str] = frozenset()) -> Changes:
    """The changes that write when keys were last used, and drop the times of those that are `gone`."""
    changes: Changes = {}
    for bucket in sorted({bucket_of(key_id) for key_id in (*uses, *gone)}):
        old = state.used.get(bucket, {})
        new = {**old, **{key_id: time for key_id, time in uses.items() if bucket_of(key_id) == bucket}}
        kept = {key_id: time for key_id, time in new.items() if key_id in state.keys and key_id not in gone}
        if kept != old:
            changes[USED + bucket] = json.dumps(kept, separators=(",", ":")) if kept else None
    return changes


def _put(table: dict[str, Any], name: str, text: str | None, parse: Any) -> None:
    record = None if text is None else parse(name, text)
    if record is None:
        table.pop(name, None)
    else:
        table[name] = record
