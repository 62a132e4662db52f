"""Tenants and keys at one moment: immutable, so that any thread may read it."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import msgspec

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.core.errors import NotFoundError, UnreadableRecordError
from lora_serve.core.tenant import MAX_LIMIT, ApiKey, Quota, Tenant, check_tenant_name

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_LATER = ("offload",)  # fields that the records of earlier versions do not have: it was not forbidden then
_log = logging.getLogger(__name__)
Record = TypeVar("Record", Tenant, ApiKey)


def document_of(record: Tenant | ApiKey) -> str:
    """The record as text."""
    shown = asdict(record)
    shown["quota"] = quota_limits(record.quota)
    return json.dumps(shown, separators=(",", ":"))


def quota_limits(quota: Quota) -> dict[str, int]:
    """The limits that there are, by name."""
    return {name: limit for name, limit in asdict(quota).items() if limit is not None}


def times_of(text: str) -> dict[str, float]:
    """When keys were last used, by id; what makes no sense is left out."""
    try:
        found = json.loads(text)
        return {key_id: float(time) for key_id, time in found.items() if isinstance(time, int | float)}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def record_of(kind: type[Record], name: str, text: str) -> Record | None:
    """The record in a text; None, and a line in the log, for a text that no server has written."""
    try:
        record = msgspec.json.decode(text, type=kind)
        _check(record, name, msgspec.json.decode(text))
    except Exception as error:
        # Whatever it is, this one opens nothing, its name is held, and the others go on. Nothing of its text is shown.
        word, reason = "tenant" if kind is Tenant else "key", type(error).__name__
        held = "requests get a 503 and nobody takes its name until it is restored, or the admin deletes it"
        _log.error("the record of the %s %.128r cannot be read and is left out (%s): %s", word, name, reason, held)
        return None
    return record


def _check(record: Tenant | ApiKey, name: str, found: Mapping[str, Any]) -> None:
    """Raises ValueError or RequestError for values that no server writes; their types are right already."""
    own_name, tenant = (record.id, record.tenant) if isinstance(record, ApiKey) else (record.name, record.name)
    check_tenant_name(tenant)
    is_right = (
        own_name == name
        and (isinstance(record, Tenant) or _HEX.match(record.digest) is not None)
        # A default would open more than was meant.
        and all(field.name in found for field in fields(record) if field.name not in _LATER)
        and all(0 <= limit <= MAX_LIMIT for limit in quota_limits(record.quota).values())
    )
    if not is_right:
        raise ValueError


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
    TENANT: partial(record_of, Tenant),
    KEY: partial(record_of, ApiKey),
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


WRONG = "The API key is not valid."
REVOKED = "The API key was revoked."
EXPIRED = "The API key has expired."
ID_LENGTH = 12
IN_TEXT = re.compile(rf"\bls-([A-Za-z0-9_]{{{ID_LENGTH}}})-[A-Za-z0-9_-]{{20,}}")  # a secret, whole or nearly
_ALPHABET = string.ascii_lowercase + string.digits
_SECRET = re.compile(rf"ls-([a-z0-9]{{{ID_LENGTH}}})-[A-Za-z0-9_-]{{43}}\Z")
_NOBODY = hashlib.sha256(b"").hexdigest()  # what is compared where there is no key: it is no secret's


def new_secret() -> tuple[str, str]:
    """A key's id, and the whole secret `ls-<id>-<43 base64url characters>`."""
    key_id = "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))
    return key_id, f"ls-{key_id}-{secrets.token_urlsafe(32)}"


def digest_of(secret: str) -> str:
    """SHA-256, hex. The secret has 256 random bits, so that no slow hash is needed."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def id_in(secret: str) -> str | None:
    """The id in a secret; None if the text has not the form of a secret."""
    match = _SECRET.match(secret)
    return match[1] if match else None


def without_secrets(text: str) -> str:
    """The text with the ids of its secrets in their place."""
    return IN_TEXT.sub(r"ls-\1-***", text)


def opens(key: ApiKey | None, secret: str) -> bool:
    """True if the secret is this key's. Takes the same time if there is no key."""
    is_equal = hmac.compare_digest(digest_of(secret), _NOBODY if key is None else key.digest)
    return is_equal and key is not None
