"""`lora-serve fleet`: several engines behind one server."""

from __future__ import annotations

from lora_serve.commands.fleet import status
from lora_serve.commands.verb import Verb, run_verbs

VERBS: tuple[Verb, ...] = (*status.VERBS,)


def run(arguments: list[str]) -> int:
    """Runs a subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_verbs("lora-serve fleet", "Several engines behind one server.", VERBS, arguments)
