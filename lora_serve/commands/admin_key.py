"""Finds the admin key that a command sends: the flag's, the environment's, or that of the store's key file."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from lora_serve.core.errors import ConfigError
from lora_serve.tenancy.authentication.admin_key import FILE_NAME

DEFAULT_STORE = "adapters_store"
LOOPBACK = ("localhost", "::1")


def find_admin_key(given: str | None, store: str | None, url: str) -> str | None:
    """The admin key, or None: the server then answers that it needs one.

    The key file of the default store is meant for a server on this machine: it is not sent to any other, unless the
    store is named. Raises ConfigError, which never shows the key.
    """
    key = given if given is not None else os.environ.get("LORA_SERVE_ADMIN_KEY")
    if not key:
        key = _read(store or os.environ.get("LORA_SERVE_STORE"), url)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("--admin-key: expected printable ASCII characters; the one given has others")
    return key


def _read(store: str | None, url: str) -> str | None:
    if store is None and not _is_this_machine(url):
        return None
    try:
        return (Path(store or DEFAULT_STORE) / FILE_NAME).read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in LOOPBACK or host.startswith("127.")
