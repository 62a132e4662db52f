"""Finds the admin key that a command sends: the flag's, the environment's, or that of the store's key file."""

from __future__ import annotations

import os
from pathlib import Path

from lora_serve.core.errors import ConfigError
from lora_serve.core.running_servers import is_this_machine, store_of
from lora_serve.tenancy.authentication.admin_key import FILE_NAME

DEFAULT_STORE = "adapters_store"


def find_admin_key(given: str | None, store: str | None, url: str) -> str | None:
    """The admin key, or None: the server then answers that it needs one.

    Without a named store it is the key file of the running server that listens at `url`, or else, if `url` is this
    machine's, of the environment's or the default store: no key file is read for another machine. Raises ConfigError,
    which never shows the key.
    """
    key = given if given is not None else os.environ.get("LORA_SERVE_ADMIN_KEY")
    if not key:
        key = _read(store, url)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("--admin-key: expected printable ASCII characters; the one given has others")
    return key


def _read(store: str | None, url: str) -> str | None:
    folder = Path(store) if store else store_of(url)
    if folder is None:
        if not is_this_machine(url):
            return None
        folder = Path(os.environ.get("LORA_SERVE_STORE") or DEFAULT_STORE)
    try:
        return (folder / FILE_NAME).read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
