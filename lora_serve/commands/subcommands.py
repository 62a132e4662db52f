"""A command with subcommands, each with a help text of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from lora_serve.commands.failure import ExitCode
from lora_serve.commands.flags import CommandParser

AddFlags = Callable[[argparse.ArgumentParser], None]


class Subcommand(Protocol):
    """A subcommand's help texts and flags."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def examples(self) -> tuple[str, ...]: ...
    @property
    def add_flags(self) -> AddFlags: ...


S = TypeVar("S", bound=Subcommand)


def make_parser(
    program: str, description: str, exit_codes: str, subcommands: Sequence[Subcommand], add_shared: AddFlags
) -> CommandParser:
    """A parser that sets `flags.verb` to the subcommand, None without one. `add_shared` adds every subcommand's
    flags.
    """
    parser = CommandParser(program, description, exit_codes)
    parser.set_defaults(verb=None)
    table = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", parser_class=CommandParser)
    for verb in subcommands:
        examples = "\n".join(f"  {program} {example}" for example in verb.examples)
        one = table.add_parser(
            verb.name, help=verb.summary, description=verb.summary, epilog=f"examples:\n{examples}\n\n{exit_codes}"
        )
        verb.add_flags(one)
        add_shared(one)
        one.set_defaults(verb=verb)
    return parser


def run_subcommand(parser: CommandParser, arguments: list[str], run: Callable[[S, argparse.Namespace], int]) -> int:
    """Parses the arguments and runs the subcommand; returns the exit code. Raises ConfigError for a wrong command
    line.
    """
    flags = parser.parse_args(arguments)
    if flags.verb is None:
        parser.print_help(sys.stderr)
        return ExitCode.WRONG_COMMAND_LINE
    return run(flags.verb, flags)
