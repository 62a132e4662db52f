"""`lora-serve adapters`: every call of the admin API on adapters, routes and aliases."""

from __future__ import annotations

from lora_serve.commands.adapters import listing, registration, residency, routes, sharing
from lora_serve.commands.verb import Verb, run_verbs

VERBS: tuple[Verb, ...] = (
    *listing.VERBS,
    *registration.VERBS,
    *residency.VERBS,
    *routes.VERBS,
    *sharing.VERBS,
)


def run(arguments: list[str]) -> int:
    """Runs a subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_verbs("lora-serve adapters", "Client of a running server's admin API.", VERBS, arguments)
