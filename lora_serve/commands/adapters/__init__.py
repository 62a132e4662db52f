"""`lora-serve adapters`: every call of the admin API on adapters, routes and aliases."""

from __future__ import annotations

import sys

from lora_serve.commands.adapters import deletion, listing, registration, residency, routes
from lora_serve.commands.failure import EXIT_CODES, ExitCode
from lora_serve.commands.flags import CommandParser, add_common_flags
from lora_serve.commands.verb import Verb, run_verb

PROGRAM = "lora-serve adapters"
VERBS: tuple[Verb, ...] = (
    *listing.VERBS,
    *registration.VERBS,
    *deletion.VERBS,
    *residency.VERBS,
    *routes.VERBS,
)


def run(arguments: list[str]) -> int:
    """The exit code (`commands.failure.ExitCode`). Raises ConfigError for a wrong command line."""
    parser = make_parser()
    flags = parser.parse_args(arguments)
    if flags.verb is None:
        parser.print_help(sys.stderr)
        return ExitCode.WRONG_COMMAND_LINE
    return run_verb(flags.verb, flags)


def make_parser() -> CommandParser:
    parser = CommandParser(PROGRAM, "Client of a running server's admin API.", EXIT_CODES)
    add_common_flags(parser)
    parser.set_defaults(verb=None)
    verbs = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", parser_class=CommandParser)
    for verb in VERBS:
        examples = "\n".join(f"  {PROGRAM} {example}" for example in verb.examples)
        one = verbs.add_parser(
            verb.name, help=verb.summary, description=verb.summary, epilog=f"examples:\n{examples}\n\n{EXIT_CODES}"
        )
        verb.add_flags(one)
        add_common_flags(one)
        one.set_defaults(verb=verb)
    return parser
