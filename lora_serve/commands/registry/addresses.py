"""Finds the registry that flags or environment name."""

from __future__ import annotations

import argparse
import os

from lora_serve.adapters.maintenance.registries import RegistryAddress
from lora_serve.commands.admin_key import DEFAULT_STORE
from lora_serve.core.errors import ConfigError
from lora_serve.core.setting_texts import check_redis_prefix

DEFAULT_PREFIX = "lora_serve"


def add_registry_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --store and --redis-url, as `serve` has them."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--store", metavar="DIR", help="the store folder of a registry of one server "
                     f"(LORA_SERVE_STORE; default: ./{DEFAULT_STORE})")  # fmt: skip
    one.add_argument("--redis-url", metavar="URL", help="the registry that replicas share (LORA_SERVE_REDIS_URL)")
    add_prefix_flag(parser)


def add_prefix_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-prefix", metavar="TEXT", help="beginning of every key in Redis "
                        f"(LORA_SERVE_REDIS_PREFIX; default: {DEFAULT_PREFIX})")  # fmt: skip


def registry_address(flags: argparse.Namespace) -> RegistryAddress:
    """The registry of --store or --redis-url, else of the environment. Raises ConfigError."""
    if flags.store is not None:
        return folder_address("--store", flags.store)
    url = flags.redis_url or os.environ.get("LORA_SERVE_REDIS_URL")
    if url:
        address = RegistryAddress(url, "--redis-url", redis_prefix(flags))
        if not address.is_redis:
            raise ConfigError("--redis-url: expected redis://host:port/db, rediss:// or unix://")
        return address
    return folder_address("--store", os.environ.get("LORA_SERVE_STORE") or DEFAULT_STORE)


def folder_or_url(flag: str, text: str, flags: argparse.Namespace) -> RegistryAddress:
    """A folder, or a Redis URL. Raises ConfigError."""
    address = RegistryAddress(text, flag, redis_prefix(flags))
    return address if address.is_redis else folder_address(flag, text)


def redis_prefix(flags: argparse.Namespace) -> str:
    """The prefix of --redis-prefix or the environment. Raises ConfigError."""
    given = flags.redis_prefix
    if given is None:
        given = os.environ.get("LORA_SERVE_REDIS_PREFIX") or DEFAULT_PREFIX
    try:
        return check_redis_prefix(given)
    except ValueError as error:
        raise ConfigError(f"--redis-prefix: {error} (got {given[:200]!r})") from None


def folder_address(flag: str, text: str) -> RegistryAddress:
    """The folder; raises ConfigError for a URL."""
    scheme, is_url, _ = text.partition("://")
    if is_url:
        raise ConfigError(f"{flag}: expected a folder, or redis:// where a URL is allowed (got {scheme[:20]}://...)")
    if not text:
        raise ConfigError(f"{flag}: expected a folder (got '')")
    return RegistryAddress(text, flag)
