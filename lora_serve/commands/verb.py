"""Verbs of the admin API: the route that each calls, the arguments that become its fields, how its answer is shown."""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from lora_serve.commands.flags import (
    DEFAULT_TIMEOUT,
    CommandParser,
    Subcommand,
    add_common_flags,
    make_parser,
    named_urls,
    run_subcommand,
    urls_here,
)
from lora_serve.commands.output import CommandError, ExitCode, Output, confirm_deletion
from lora_serve.core.errors import ConfigError

if TYPE_CHECKING:  # --help and mistakes need no HTTP client
    from lora_serve.commands.admin_client import AdminClient, AdminReply

EXIT_CODES = """exit codes:
  0    well
  1    the server refused (its message and reasons are printed), or --wait ran out of time
  2    the command line is wrong
  3    the server cannot be reached, or did not answer within --timeout
  4    there is no such adapter, version, alias, tenant or key (404)
  5    the server cannot do it now (503): its Retry-After is printed, try again then
  130  interrupted (Ctrl-C)"""
MAX_PAGE = 1000  # the server's own limit
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two looks of --wait; doubled from one to the other
NOT_SENT = {"verb", "server", "url", "admin_key", "store", "timeout", "json", "yes", "wait", "csv", "limit", "all"}
Document = dict[str, Any]
Given = dict[str, Any]  # the arguments that are given, by their names
Shown = RenderableType | tuple[RenderableType, ...]
Condition = Callable[[Document | None], str]  # an adapter's card (None: there is none) -> what it lacks; "": nothing


@dataclass(frozen=True, slots=True)
class Verb(Subcommand):
    """A subcommand that calls a route of the server's table.

    The arguments whose names stand in the path fill it; all others that are given are fields of the body, of a GET or
    DELETE of the query, unless they are NOT_SENT.
    """

    route: str  # method and path
    show: Callable[[Document, Given], Shown] | None  # the answer, for people; None: `run` shows it
    check: Callable[[Given], object] | None = None  # before anything is sent; raises ConfigError
    deletes: Callable[[Given], str] | None = None  # what is asked about first, unless --yes is given
    waits_for: Callable[[Document, Given], Condition] | None = None  # what --wait waits for after such an answer
    run: Callable[[Invocation], Awaitable[None]] | None = None  # in place of one call
    page_limit: float | None = None  # of a list in pages: rows without --limit; None: the answer is no page
    csv: Callable[[Document], Iterable[Iterable[object]]] | None = None  # the lines of --csv
    note: Callable[[Document], Iterable[str]] = lambda document: ()  # lines on standard error
    hint: Callable[[Document], Iterable[str]] = lambda document: ()  # such lines where --json is not given

    @property
    def is_read_only(self) -> bool:
        """True if the server stays as it is, so that any of several may be asked."""
        return self.route.startswith("GET ")


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of a verb: its arguments, output and connected servers."""

    verb: Verb
    given: Given
    output: Output
    clients: list[AdminClient]  # one per --url
    timeout: float  # seconds

    @property
    def client(self) -> AdminClient:
        """The first server, which gets the call; the others are only waited for with --wait."""
        return self.clients[0]

    async def run(self) -> None:
        """Calls the route, waits if that is asked for, and shows the answer."""
        await self.finish((await self.send()).data if self.verb.page_limit is None else await self._all_pages())

    async def finish(self, document: Document) -> None:
        await self.wait(document)
        self.show(document)

    async def send(self, route: str = "", fields: Document | None = None) -> AdminReply:
        """One call of the verb's route, or of another; `fields`: in place of the arguments'."""
        method, _, path = (route or self.verb.route).partition(" ")
        fields = fields_of(self.given, path) if fields is None else fields
        path = path.format_map(self.given)  # a legal id holds nothing that needs quoting
        if method in ("GET", "DELETE"):
            return await self.client.call(method, path, query={name: str(value) for name, value in fields.items()})
        return await self.client.call(method, path, body=fields or None)

    async def _all_pages(self) -> Document:
        """Follows the server's pages up to the limit, and returns them as one answer."""
        assert self.verb.page_limit is not None
        limit = math.inf if "all" in self.given else self.given.get("limit", self.verb.page_limit)
        query, data = fields_of(self.given, ""), list[Document]()
        while True:
            page = (await self.send(fields=query | {"limit": min(limit - len(data), MAX_PAGE)})).data
            data += page["data"]
            if not page["has_more"] or len(data) >= limit:
                return {**page, "data": data}
            query["after"] = page["last_id"]

    async def wait(self, document: Document) -> None:
        """With --wait, waits for all servers, and names them. Raises CommandError (REFUSED), with a line per server,
        if one refuses to tell, or has not followed within --timeout.
        """
        if self.verb.waits_for is None or "wait" not in self.given:
            return
        condition, deadline = self.verb.waits_for(document, self.given), time.monotonic() + self.timeout
        path = f"/admin/adapters/{document['id']}"
        missing = await asyncio.gather(*(wait_for(client, path, condition, deadline) for client in self.clients))
        lines = [f"{client.url}: {reason or 'done'}" for client, reason in zip(self.clients, missing, strict=True)]
        if any(missing):
            first = f"{self.client.url} took the change, but it is not seen everywhere (--timeout {self.timeout:g}):"
            raise CommandError(ExitCode.REFUSED, first, *lines)
        if len(lines) > 1:
            self.output.note(*lines)

    def show(self, document: Document) -> None:
        """Prints the answer as JSON, as CSV or for people, then the notes on it."""
        if "csv" in self.given and self.verb.csv is not None and not self.output.as_json:
            csv.writer(sys.stdout, lineterminator="\n").writerows(self.verb.csv(document))
        else:
            assert self.verb.show is not None
            shown = self.verb.show(document, self.given)
            self.output.show(document, *(shown if isinstance(shown, tuple) else (shown,)))
        if not self.output.as_json:
            self.output.note(*self.verb.hint(document))
        self.output.note(*self.verb.note(document))


async def wait_for(client: AdminClient, path: str, condition: Condition, deadline: float) -> str:
    """The change that a server still lacks at the deadline; one that is away or not ready may come back until then."""
    pause, missing = FIRST_PAUSE, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            missing = condition((await asyncio.wait_for(client.call("GET", path), left)).data)
        except TimeoutError:
            break
        except CommandError as error:
            said = " ".join(error.lines).removeprefix(f"{client.url}: ")
            missing = condition(None) if error.code is ExitCode.NOT_FOUND else said
            if error.code is ExitCode.REFUSED:
                break
        if not missing:
            break
        await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE)
    return missing


def fields_of(given: Given, path: str) -> Document:
    """The fields of a call: what is given, but for what stands in the path. `quota.max_running` is one of `quota`'s."""
    fields: Document = {}
    for name, value in given.items():
        group, dot, part = name.partition(".")
        if dot:
            fields.setdefault(group, {})[part] = value
        elif name not in NOT_SENT and f"{{{name}}}" not in path:
            fields[name] = value
    return fields


def run_verb(verb: Verb, flags: argparse.Namespace) -> int:
    """Checks and runs the subcommand; returns the exit code. Raises ConfigError."""
    given = vars(flags)
    output = Output(given.get("json", False))
    named, here = given.get("url") or named_urls(), urls_here()
    if not (named or verb.is_read_only) and len(here) > 1:
        words = "several servers run here, and none is named: nothing was sent. Choose one by --url or LORA_SERVE_URL"
        raise ConfigError(f"{words}: {', '.join(here)}")
    given["server"] = (named or here)[0]
    try:
        if verb.check is not None:
            verb.check(given)
        if verb.deletes is not None:
            confirm_deletion("yes" in given, f"{verb.deletes(given)} at {given['server']}")
        if not named and (len(here) > 1 or not verb.is_read_only):
            output.note(f"server: {given['server']}")
        asyncio.run(_run(verb, given, output, named or here[:1]))
    except CommandError as error:
        output.fail(error)
        return error.code
    except KeyboardInterrupt:
        output.note("interrupted")
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def run_verbs(program: str, description: str, verbs: Sequence[Verb], arguments: list[str]) -> int:
    """Runs a command with subcommands, whose shared flags may stand before or after the subcommand.

    Returns the exit code (`commands.output.ExitCode`). Raises ConfigError for a wrong command line.
    """
    parser = make_parser(program, description, EXIT_CODES, verbs, add_common_flags)
    add_common_flags(parser)
    return run_subcommand(parser, arguments, run_verb)


def run_alone(verb: Verb, arguments: list[str]) -> int:
    """Runs a command that has no subcommands; returns the exit code. Raises ConfigError."""
    parser = CommandParser(verb.name, verb.summary, EXIT_CODES)
    for add in (*verb.arguments, add_common_flags):
        add(parser)
    return run_verb(verb, parser.parse_args(arguments))


async def _run(verb: Verb, given: Given, output: Output, urls: list[str]) -> None:
    from lora_serve.commands.admin_client import AdminClient, find_admin_key

    timeout = given.get("timeout", DEFAULT_TIMEOUT)
    keys = [find_admin_key(given.get("admin_key"), given.get("store"), url) for url in urls]
    made = [AdminClient(url, key, timeout, output.note) for url, key in zip(urls, keys, strict=True)]
    async with AsyncExitStack() as stack:
        call = Invocation(verb, given, output, [await stack.enter_async_context(client) for client in made], timeout)
        try:
            await (verb.run(call) if verb.run else call.run())
        finally:
            left = ", ".join(client.url for client in call.clients if not client.is_asked)
            if left and not verb.is_read_only:
                output.note(f"not asked: {left} (the first --url is, and those that --wait waits for)")
