"""Subcommands of `lora-serve registry`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from lora_serve.commands.failure import CommandError, ExitCode
from lora_serve.commands.output import Output
from lora_serve.core.errors import AdapterUnavailableError

EXIT_CODES = """exit codes:
  0    well
  1    something could not be copied, or is not sound: each is named on standard error
  2    the command line is wrong, a folder is in use or cannot be used, or there is no registry
  5    Redis or the disk failed: what is there is whole; run the same again
  130  interrupted (Ctrl-C): what is there is whole; run the same again"""


@dataclass(frozen=True, slots=True)
class Verb:
    """A subcommand. `examples`: lines of --help, without the program's name.

    `run` returns True if all is well; raises ConfigError, AdapterUnavailableError.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], bool]


def run_verb(verb: Verb, flags: argparse.Namespace) -> int:
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
