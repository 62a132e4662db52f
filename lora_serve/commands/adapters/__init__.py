"""`lora-serve adapters`: every call of the admin API on adapters, routes and aliases."""

from __future__ import annotations

from lora_serve.commands.adapters import deletion, listing, registration, residency, routes, sharing
from lora_serve.commands.failure import EXIT_CODES
from lora_serve.commands.flags import CommandParser, add_common_flags
from lora_serve.commands.subcommands import make_parser, run_subcommand
from lora_serve.commands.verb import Verb, run_verb

PROGRAM = "lora-serve adapters"
VERBS: tuple[Verb, ...] = (
    *listing.VERBS,
    *registration.VERBS,
    *deletion.VERBS,
    *residency.VERBS,
    *routes.VERBS,
    *sharing.VERBS,
)


def run(arguments: list[str]) -> int:
    """Runs a subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_subcommand(adapters_parser(), arguments, run_verb)


def adapters_parser() -> CommandParser:
    """The parser; flags of every subcommand may also stand before it."""
    parser = make_parser(PROGRAM, "Client of a running server's admin API.", EXIT_CODES, VERBS, add_common_flags)
    add_common_flags(parser)
    return parser
