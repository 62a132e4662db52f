"""`lora-serve registry`: the registry itself, without a server: back it up, move it, look at it, verify it."""

from __future__ import annotations

import sys

from lora_serve.commands.failure import ExitCode
from lora_serve.commands.flags import CommandParser
from lora_serve.commands.registry import copying, looking
from lora_serve.commands.registry.verb import EXIT_CODES, Verb, run_verb

PROGRAM = "lora-serve registry"
VERBS: tuple[Verb, ...] = (*copying.VERBS, *looking.VERBS)
DESCRIPTION = """Works on the registry itself, a store folder or Redis, without a server. A store folder is locked
meanwhile, so no server may be using it; Redis may be live. Keys and secrets are never copied."""


def run(arguments: list[str]) -> int:
    """The exit code (`EXIT_CODES`). Raises ConfigError for a wrong command line, or a registry that is not there."""
    parser = make_parser()
    flags = parser.parse_args(arguments)
    if flags.verb is None:
        parser.print_help(sys.stderr)
        return ExitCode.WRONG_COMMAND_LINE
    return run_verb(flags.verb, flags)


def make_parser() -> CommandParser:
    parser = CommandParser(PROGRAM, DESCRIPTION, EXIT_CODES)
    parser.set_defaults(verb=None)
    verbs = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", parser_class=CommandParser)
    for verb in VERBS:
        examples = "\n".join(f"  {PROGRAM} {example}" for example in verb.examples)
        one = verbs.add_parser(
            verb.name, help=verb.summary, description=verb.summary, epilog=f"examples:\n{examples}\n\n{EXIT_CODES}"
        )
        verb.add_flags(one)
        one.add_argument("--json", action="store_true", help="print one JSON document on standard output, nothing else")
        one.set_defaults(verb=verb)
    return parser
