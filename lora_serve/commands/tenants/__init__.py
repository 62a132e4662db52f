"""`lora-serve tenants`: who may use the server, and how much of it."""

from __future__ import annotations

from lora_serve.commands.failure import EXIT_CODES
from lora_serve.commands.flags import CommandParser, add_common_flags
from lora_serve.commands.subcommands import make_parser, run_subcommand
from lora_serve.commands.tenants.verbs import VERBS
from lora_serve.commands.verb import run_verb

PROGRAM = "lora-serve tenants"


def run(arguments: list[str]) -> int:
    """Runs a subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_subcommand(tenants_parser(), arguments, run_verb)


def tenants_parser() -> CommandParser:
    """The parser; flags of every subcommand may also stand before it."""
    parser = make_parser(PROGRAM, "Tenants of a running server.", EXIT_CODES, VERBS, add_common_flags)
    add_common_flags(parser)
    return parser
