"""Subcommands of the admin API's clients: flags, checks before anything is sent, calls to the servers."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_serve.commands.failure import EXIT_CODES, CommandError, ExitCode
from lora_serve.commands.flags import DEFAULT_TIMEOUT, CommandParser, add_common_flags, named_urls, urls_here
from lora_serve.commands.output import Output
from lora_serve.commands.subcommands import make_parser, run_subcommand
from lora_serve.core.errors import ConfigError

MAX_PAGE = 1000  # the server's own limit
LOOKS = ("list", "show", "aliases", "whoami", "lora-serve usage", "lora-serve audit", "lora-serve fleet status")

if TYPE_CHECKING:  # --help and mistakes need no HTTP client
    from lora_serve.commands.admin_client import AdminClient


@dataclass(frozen=True, slots=True)
class Call:
    """The flags, output and connected servers of one run."""

    flags: argparse.Namespace
    output: Output
    clients: list[AdminClient]  # one per --url
    timeout: float  # seconds

    @property
    def client(self) -> AdminClient:
        """The first server, which gets the call; the others are only waited for with --wait."""
        return self.clients[0]


@dataclass(frozen=True, slots=True)
class Verb:
    """A subcommand. `examples`: lines of --help, without the program's name. `check` raises ConfigError,
    CommandError; `flags.server` is then the server that is asked.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Call], Awaitable[None]]
    check: Callable[[argparse.Namespace], None] | None = None


async def all_pages(call: Call, path: str, limit: int | None, **given: str | None) -> dict[str, Any]:
    """Follows the server's pages, to their end without a limit, and returns them as one answer."""
    query = {name: text for name, text in given.items() if text is not None}
    data: list[dict[str, Any]] = []
    while True:
        query["limit"] = str(MAX_PAGE if limit is None else min(limit - len(data), MAX_PAGE))
        page = (await call.client.call("GET", path, query=query)).data
        data += page["data"]
        if not page["has_more"] or (limit is not None and len(data) >= limit):
            return {**page, "data": data}
        query["after"] = page["last_id"]


def run_verb(verb: Verb, flags: argparse.Namespace) -> int:
    """Checks and runs the subcommand; returns the exit code. Raises ConfigError."""
    given = vars(flags)
    output = Output(given.get("json", False))
    named, here, is_look = given.get("url") or named_urls(), urls_here(), verb.name in LOOKS
    if not (named or is_look) and len(here) > 1:
        words = "several servers run here, and none is named: nothing was sent. Choose one by --url or LORA_SERVE_URL"
        raise ConfigError(f"{words}: {', '.join(here)}")
    flags.server = (named or here)[0]
    try:
        if verb.check is not None:
            verb.check(flags)
        if not named and (len(here) > 1 or not is_look):
            output.note(f"server: {flags.server}")
        asyncio.run(_run(verb, flags, output, given.get("timeout", DEFAULT_TIMEOUT), named or here[:1]))
    except CommandError as error:
        output.fail(error)
        return error.code
    except KeyboardInterrupt:
        output.note("interrupted")
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def run_verbs(program: str, description: str, verbs: Sequence[Verb], arguments: list[str]) -> int:
    """Runs a command with subcommands, whose shared flags may stand before or after the subcommand.

    Returns the exit code (`commands.failure.ExitCode`). Raises ConfigError for a wrong command line.
    """
    parser = make_parser(program, description, EXIT_CODES, verbs, add_common_flags)
    add_common_flags(parser)
    return run_subcommand(parser, arguments, run_verb)


def run_alone(verb: Verb, arguments: list[str]) -> int:
    """Runs a command that has no subcommands; returns the exit code. Raises ConfigError."""
    parser = CommandParser(verb.name, verb.summary, EXIT_CODES)
    verb.add_flags(parser)
    add_common_flags(parser)
    return run_verb(verb, parser.parse_args(arguments))


async def _run(verb: Verb, flags: argparse.Namespace, output: Output, timeout: float, urls: list[str]) -> None:
    from lora_serve.commands.admin_client import AdminClient
    from lora_serve.commands.admin_key import find_admin_key

    given = vars(flags)
    keys = [find_admin_key(given.get("admin_key"), given.get("store"), url) for url in urls]
    made = [AdminClient(url, key, timeout, output.note) for url, key in zip(urls, keys, strict=True)]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client) for client in made]
        try:
            await verb.run(Call(flags, output, clients, timeout))
        finally:
            left = ", ".join(client.url for client in clients if not client.is_asked)
            if left and verb.name not in LOOKS:
                output.note(f"not asked: {left} (the first --url is, and those that --wait waits for)")
