"""Failures of commands: exit codes, and what is printed on standard error."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

PREFIX = "The adapter cannot be served: "  # what a server's InvalidAdapterError begins with; its reasons follow
KEY_HINT = "give the server's admin key by --admin-key, LORA_SERVE_ADMIN_KEY or --store"


class ExitCode(enum.IntEnum):
    OK = 0
    REFUSED = 1
    WRONG_COMMAND_LINE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5
    INTERRUPTED = 130


EXIT_CODES = """exit codes:
  0    well
  1    the server refused (its message and reasons are printed), or --wait ran out of time
  2    the command line is wrong
  3    the server cannot be reached, or did not answer within --timeout
  4    there is no such adapter, version, alias, tenant or key (404)
  5    the server cannot do it now (503): its Retry-After is printed, try again then
  130  interrupted (Ctrl-C)"""


class CommandError(Exception):
    """The command ends with `code`; `lines` are for people, on standard error."""

    def __init__(self, code: ExitCode, *lines: str, retry_after: float | None = None) -> None:
        """`retry_after`: seconds after which the call may be repeated; None: not at all."""
        super().__init__("\n".join(lines))
        self.code = code
        self.lines = lines
        self.retry_after = retry_after


def refusal(url: str, status: int, body: Any, headers: Mapping[str, str]) -> CommandError:
    """The error for the answer of 400 and above of the server at `url`; `body` is its JSON, None if it sent none."""
    first, *rest = _lines(status, body)
    lines = [f"{url}: {first}", *rest]
    if status in (401, 403):
        lines.append(KEY_HINT)
    if wait := headers.get("Retry-After"):
        lines.append(f"try again in {wait[:20]} s (Retry-After)")
    retry_after = float(wait) if status == 429 and wait and wait.isdecimal() and not _is_wrong_key(body) else None
    codes = {404: ExitCode.NOT_FOUND, 503: ExitCode.UNAVAILABLE}
    return CommandError(codes.get(status, ExitCode.REFUSED), *lines, retry_after=retry_after)


def _is_wrong_key(body: Any) -> bool:
    """True for a wrong admin key, which no waiting mends."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("code") == "invalid_api_key"


def _lines(status: int, body: Any) -> list[str]:
    """The message; an adapter's reasons one per line."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        return [f"the server answered {status}"]
    if not message.startswith(PREFIX):
        return message.splitlines() or [f"the server answered {status}"]
    return [PREFIX.strip(), *(f"- {reason}" for reason in message.removeprefix(PREFIX).split("; "))]
