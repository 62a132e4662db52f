"""The admin key: configured, or made at the first start and kept in the store (mode 0600)."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.adapters.stores.files import UNWRITABLE, StoreMonitor, flush, read_small_file, words_of
from lora_serve.core.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_NAME = "admin_key"
MIN_LENGTH = 8


@dataclass(frozen=True, slots=True)
class AdminKey:
    """The SHA-256 of the admin key: no log, repr or crash dump can show the key itself."""

    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: str) -> AdminKey:
        return cls(hashlib.sha256(secret.encode()).digest())

    def matches(self, candidate: str) -> bool:
        """Compare in constant time; `candidate` may be anything a client sent."""
        offered = hashlib.sha256(candidate.encode("utf-8", "surrogateescape")).digest()
        return hmac.compare_digest(self.digest, offered)


def load_admin_key(configured: str | None, store: Path, monitor: StoreMonitor | None = None) -> AdminKey:
    """Return the configured key, else the one in `store`/admin_key, which is made (256 random bits) if missing.

    Logs where the key lies, never the key. The caller holds the store. `monitor`: writes a new key later if that is not
    possible now; until then it is shown to no one. Raises ConfigError if the file cannot be read, made or used.
    """
    _remove_leftovers(store)
    if configured is not None:
        return AdminKey.of(configured)
    path = store / FILE_NAME
    try:
        secret = _read(path) if path.exists() else _created(path, monitor)
        is_kept = path.exists()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-key: the key file {path} cannot be used: {words_of(error)}") from error
    if is_kept:
        logger.info("the admin key is in %s", path.absolute())
    else:
        logger.warning("a new admin key is written into %s once there is room; --admin-key names one meanwhile", path)
    return AdminKey.of(secret)


def _remove_leftovers(store: Path) -> None:
    """Removes what starts that were killed left of keys that they were making."""
    for aside in store.glob(f".{FILE_NAME}.*"):
        with suppress(OSError):
            aside.unlink()


def check_key_file(store: Path) -> None:
    """Raises ConfigError if the store holds a key file that cannot be used."""
    path = store / FILE_NAME
    try:
        if path.exists():
            _read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-key: the key file {path} cannot be used: {words_of(error)}") from error


def _read(path: Path) -> str:
    secret = read_small_file(path).decode().strip()
    if len(secret) < MIN_LENGTH:
        raise ConfigError(f"--admin-key: {path} holds no key of at least {MIN_LENGTH} characters; remove it")
    if path.stat().st_mode & 0o077:
        with suppress(OSError):  # on a disk that is read-only
            path.chmod(0o600)
    return secret


def _created(path: Path, monitor: StoreMonitor | None) -> str:
    secret = secrets.token_urlsafe(32)
    try:
        return _create(path, secret)
    except OSError as error:
        if error.errno not in UNWRITABLE or monitor is None:
            raise
    monitor.retry_when_writable("the admin key", lambda: _keep(path, secret))
    return secret


def _keep(path: Path, secret: str) -> None:
    """Raises ConfigError if another process has put another one there meanwhile."""
    if _create(path, secret) != secret:
        raise ConfigError(f"{path.name} was put there meanwhile; it counts from the next start on")


def _create(path: Path, secret: str) -> str:
    """Write a new key aside, then link it into place: a second server starting now takes the winner's key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{FILE_NAME}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, path)
        flush(path.parent)
    except FileExistsError:
        return _read(path)
    finally:
        aside.unlink(missing_ok=True)
    return secret
