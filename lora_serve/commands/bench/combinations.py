"""Checks combinations of flags, without asking a server."""

from __future__ import annotations

import argparse
import os

from lora_serve.core.errors import ConfigError

NUM_ADAPTERS = 16  # of a server of our own


def check_flags(flags: argparse.Namespace) -> None:
    """Checks the flags against each other. Raises ConfigError."""
    if flags.spawn and flags.url is not None:
        raise ConfigError("--spawn: starts a server of its own, so there is no --url")
    if flags.spawn and isinstance(flags.adapters, tuple):
        raise ConfigError("--adapters: with --spawn a number; it makes them")
    if flags.burstiness is not None and flags.arrival != "gamma":
        raise ConfigError("--burstiness: goes with --arrival gamma")
    if flags.arrival == "gamma" and flags.rate is None:
        raise ConfigError("--arrival gamma: needs a --rate")
    if flags.speed != 1 and (flags.trace is None or flags.rate is not None):
        raise ConfigError("--speed: is the pace of a --trace's own times")
    if flags.endpoint == "chat" and flags.prompt_form == "ids":
        raise ConfigError("--prompt-form ids: chat takes text")
    if flags.adapter_name_pattern is not None and not isinstance(flags.adapters, int):
        raise ConfigError("--adapter-name-pattern: needs --adapters N")


def popularity_of(flags: argparse.Namespace) -> str:
    given: str | None = flags.popularity
    return given or ("uniform" if flags.spawn or flags.adapters is not None else "base")


def num_spawned(flags: argparse.Namespace) -> int:
    if flags.adapters is not None:
        return int(flags.adapters)
    return 0 if popularity_of(flags) == "base" else NUM_ADAPTERS


def api_key(flags: argparse.Namespace) -> str | None:
    given: str | None = flags.api_key
    return given or os.environ.get("LORA_SERVE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
