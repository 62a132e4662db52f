"""`lora-serve registry`: the registry itself, without a server: back it up, move it, look at it, verify it."""

from __future__ import annotations

import argparse

from lora_serve.commands.flags import make_parser, run_subcommand
from lora_serve.commands.registry.checking import LOOK_VERBS, MEND_VERBS
from lora_serve.commands.registry.copying import BACKUP_VERBS, COPY_VERBS
from lora_serve.commands.registry.subcommand import EXIT_CODES, Verb, run_verb

PROGRAM = "lora-serve registry"
VERBS: tuple[Verb, ...] = (*COPY_VERBS, *LOOK_VERBS, *MEND_VERBS, *BACKUP_VERBS)
DESCRIPTION = """Works on the registry itself, a store folder or Redis, without a server. A store folder is locked
meanwhile, so no server may be using it, but for `backup`; Redis may be live. `export`, `import` and `migrate` carry
adapters from one registry to another, and no keys; `backup` and `restore` keep all that a server knows, keys as
hashes."""


def run(arguments: list[str]) -> int:
    """The exit code (`EXIT_CODES`). Raises ConfigError for a wrong command line, or a registry that is not there."""
    parser = make_parser(PROGRAM, DESCRIPTION, EXIT_CODES, VERBS, _add_json)
    return run_subcommand(parser, arguments, run_verb)


def _add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output, nothing else")
