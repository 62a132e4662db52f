"""Subcommands of `lora-serve registry`, and the registry that their flags, or the environment, name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

from lora_serve.adapters.maintenance.registries import RegistryAddress
from lora_serve.commands.flags import DEFAULT_STORE, Subcommand, argument, one_of
from lora_serve.commands.output import CommandError, ExitCode, Output
from lora_serve.core.errors import AdapterUnavailableError, ConfigError
from lora_serve.core.setting_texts import check_redis_prefix

DEFAULT_PREFIX = "lora_serve"
EXIT_CODES = """exit codes:
  0    well
  1    something could not be copied, or is not sound: each is named on standard error
  2    the command line is wrong, a folder is in use or cannot be used, or there is no registry
  5    Redis or the disk failed: what is there is whole; run the same again
  130  interrupted (Ctrl-C): what is there is whole; run the same again"""


@dataclass(frozen=True, slots=True)
class RegistryVerb(Subcommand):
    """A subcommand on the registry itself."""

    run: Callable[[argparse.Namespace, Output], bool]
    """Returns True if all is well. Raises ConfigError, AdapterUnavailableError."""


def run_verb(verb: RegistryVerb, flags: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code. Raises ConfigError."""
    output = Output(flags.json)
    try:
        return ExitCode.OK if verb.run(flags, output) else ExitCode.REFUSED
    except AdapterUnavailableError as error:
        output.fail(CommandError(ExitCode.UNAVAILABLE, str(error)))
        return ExitCode.UNAVAILABLE
    except KeyboardInterrupt:
        output.note("interrupted")
        return ExitCode.INTERRUPTED


REDIS_PREFIX = argument(
    "--redis-prefix",
    metavar="TEXT",
    default=None,
    help=f"beginning of every key in Redis (LORA_SERVE_REDIS_PREFIX; default: {DEFAULT_PREFIX})",
)
REGISTRY = (  # --store and --redis-url, as `serve` has them
    one_of(
        argument(
            "--store",
            metavar="DIR",
            default=None,
            help=f"the store folder of a registry of one server (LORA_SERVE_STORE; default: ./{DEFAULT_STORE})",
        ),
        argument(
            "--redis-url",
            metavar="URL",
            default=None,
            help="the registry that replicas share (LORA_SERVE_REDIS_URL)",
        ),
    ),
    REDIS_PREFIX,
)


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
