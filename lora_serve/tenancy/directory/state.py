"""Tenants and keys at one moment: immutable, so that any thread may read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.core.errors import NotFoundError, UnreadableRecordError
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
    held: frozenset[str] = frozenset()  # keys of records of tenants and keys that cannot be read

    def after(self, page: Page) -> DirectoryState:
        """The state after these records have changed. One that cannot be read opens nothing, and its name is held."""
        tables: dict[str, dict[str, Any]] = {TENANT: dict(self.tenants), KEY: dict(self.keys), USED: dict(self.used)}
        held = set(self.held)
        for record, text in page.records.items():
            kind = next((kind for kind in _PARSERS if record.startswith(kind)), None)
            if kind is not None:
                is_read = _put(tables[kind], record.removeprefix(kind), text, _PARSERS[kind])
                (held.discard if is_read else held.add)(record)
        return DirectoryState(page.position, tables[TENANT], tables[KEY], tables[USED], frozenset(held))

    def check_held(self, kind: str, name: str) -> None:
        """Raises UnreadableRecordError if the record cannot be read. `kind`: TENANT or KEY."""
        if kind + name in self.held:
            mended = "it is restored from a backup, or the admin deletes it"
            raise UnreadableRecordError(
                f"The record of the {kind[:-1]} `{name}` cannot be read: held until {mended}.", 60
            )

    def held_names(self, kind: str) -> list[str]:
        """The names of a kind that are held, sorted."""
        return sorted(record.removeprefix(kind) for record in self.held if record.startswith(kind))

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name. Raises NotFoundError, UnreadableRecordError."""
        self.check_held(TENANT, name)
        found = self.tenants.get(name)
        if found is None:
            raise NotFoundError(name)
        return found

    def key(self, tenant: str, key_id: str) -> ApiKey:
        """The tenant's key of that id. Raises NotFoundError, for another tenant's key too; UnreadableRecordError."""
        self.check_held(KEY, key_id)
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


_PARSERS: Mapping[str, Callable[[str, str], Any]] = {
    TENANT: tenant_of,
    KEY: key_of,
    USED: lambda _, text: times_of(text),
}


def _put(table: dict[str, Any], name: str, text: str | None, parse: Callable[[str, str], Any]) -> bool:
    """True if the record could be read, or is gone."""
    record = None if text is None else parse(name, text)
    if record is None:
        table.pop(name, None)
    else:
        table[name] = record
    return text is None or record is not None
