"""`lora-serve keys`: the API keys of a tenant."""

from __future__ import annotations

from lora_serve.commands.failure import EXIT_CODES
from lora_serve.commands.flags import CommandParser, add_common_flags
from lora_serve.commands.keys.verbs import VERBS
from lora_serve.commands.subcommands import make_parser, run_subcommand
from lora_serve.commands.verb import run_verb

PROGRAM = "lora-serve keys"


def run(arguments: list[str]) -> int:
    """Runs a subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_subcommand(keys_parser(), arguments, run_verb)


def keys_parser() -> CommandParser:
    """The parser; flags of every subcommand may also stand before it."""
    parser = make_parser(PROGRAM, "API keys of a running server's tenants.", EXIT_CODES, VERBS, add_common_flags)
    add_common_flags(parser)
    return parser
