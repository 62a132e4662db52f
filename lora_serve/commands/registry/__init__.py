"""`lora-serve registry`: the registry itself, without a server: back it up, move it, look at it, verify it."""

from __future__ import annotations

import argparse

from lora_serve.commands.registry import backing_up, copying, looking, mending
from lora_serve.commands.registry.verb import EXIT_CODES, Verb, run_verb
from lora_serve.commands.subcommands import make_parser, run_subcommand

PROGRAM = "lora-serve registry"
VERBS: tuple[Verb, ...] = (*copying.VERBS, *looking.VERBS, *mending.VERBS, *backing_up.VERBS)
DESCRIPTION = """Works on the registry itself, a store folder or Redis, without a server. A store folder is locked
meanwhile, so no server may be using it, but for `backup`; Redis may be live. `export`, `import` and `migrate` carry
adapters from one registry to another, and no keys; `backup` and `restore` keep all that a server knows, keys as
hashes."""


def run(arguments: list[str]) -> int:
    """The exit code (`EXIT_CODES`). Raises ConfigError for a wrong command line, or a registry that is not there."""
    parser = make_parser(PROGRAM, DESCRIPTION, EXIT_CODES, VERBS, _add_json)
    return run_subcommand(parser, arguments, run_verb)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output, nothing else")
