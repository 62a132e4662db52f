"""The flags that all clients of the admin API share, and the types of their values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

from lora_serve.core.adapter import check_adapter_id, check_new_adapter_id
from lora_serve.core.errors import ConfigError, InvalidRequestError
from lora_serve.core.flags import FlagParser
from lora_serve.core.running_servers import running_servers
from lora_serve.core.strict_json import JsonError, parse_json
from lora_serve.core.tenant import check_tenant_name

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT = 120.0  # seconds


class CommandParser(FlagParser):
    """A FlagParser that also refuses unknown flags as a subcommand, and keeps the lines of its epilog."""

    def __init__(self, prog: str, description: str = "", epilog: str | None = None) -> None:
        super().__init__(prog, description, {})
        self.epilog = epilog
        self.formatter_class = argparse.RawDescriptionHelpFormatter

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Raises ConfigError for what is left over."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return found, unknown


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the shared flags; they default to SUPPRESS and may stand before or after the subcommand."""
    group = parser.add_argument_group("flags of every subcommand")

    def add(flag: str, help_text: str, **options: Any) -> None:
        group.add_argument(flag, help=help_text, default=argparse.SUPPRESS, **options)

    add("--url", f"the server (LORA_SERVE_URL; default: the one that runs here, else {DEFAULT_URL}; what changes "
        "something is refused where several run); given more than once, the first is asked and --wait waits for all",
        action="append", type=server_url, metavar="URL")  # fmt: skip
    add(
        "--admin-key",
        "the server's admin key (LORA_SERVE_ADMIN_KEY; default: the key file of the server's store)",
        metavar="KEY",
    )
    add("--store", "the server's store on this machine, which holds the key file (default, for a server here: the "
        "one it was started with, else LORA_SERVE_STORE, else ./adapters_store)", metavar="DIR")  # fmt: skip
    add("--timeout", f"seconds to wait for an answer, and for --wait altogether (default: {DEFAULT_TIMEOUT:g})",
        type=seconds, metavar="SECONDS")  # fmt: skip
    add("--json", "print the server's JSON, one document, and nothing else on standard output", action="store_true")


def add_id_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=adapter_id, metavar="ID")


def add_wait_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait", action="store_true", help="end well only once every --url shows the change, else exit with 1"
    )


def named_urls() -> list[str]:
    """LORA_SERVE_URL, comma-separated. Raises ConfigError."""
    texts = [text.strip() for text in os.environ.get("LORA_SERVE_URL", "").split(",")]
    try:
        return [server_url(text) for text in texts if text]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"LORA_SERVE_URL: {error}") from error


def urls_here() -> list[str]:
    """The servers of this user on this machine, the one that was started last first; the default URL without any."""
    return [server.url for server in running_servers()] or [DEFAULT_URL]


def server_url(text: str) -> str:
    """http(s)://host[:port][/prefix], without its last slash."""
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or parts.username is not None or parts.query or parts.fragment:
        _wrong(f"expected http://HOST[:PORT] or https://..., without user, query or fragment (got {text!r})")
    return text.rstrip("/")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        _wrong(f"expected a number of seconds above 0, at most a day (got {text!r})")
    return value


def _checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """The type of an argument that `check` takes or refuses, in the server's words."""

    def convert(text: str) -> str:
        try:
            return check(text)
        except InvalidRequestError as error:
            _wrong(str(error))

    return convert


adapter_id, new_adapter_id = _checked(check_adapter_id), _checked(check_new_adapter_id)
tenant_name = _checked(check_tenant_name)


def count(text: str) -> int:
    """A number from 1 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
        _wrong(f"expected a number from 1 on (got {text!r})")
    return int(text)


def percent(text: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        _wrong(f"expected a percentage from 0 to 100 (got {text!r})")
    return int(value) if value.is_integer() else value


def canary(text: str) -> dict[str, int | float]:
    """Parses VERSION=PERCENT into the admin API's `canary`. Raises ArgumentTypeError."""
    version, equals, share = text.partition("=")
    if not equals:
        _wrong(f"expected VERSION=PERCENT, as in 4=10 (got {text!r})")
    return {"version": count(version), "percent": percent(share)}


def json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text.encode("utf-8", "surrogateescape"))
    except JsonError as error:
        _wrong(f"expected a JSON object ({error.reason})")
    if not isinstance(value, dict):
        _wrong(f"expected a JSON object (got {text[:60]!r})")
    return value


def _wrong(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)


def adapter_path(adapter_id: str, verb: str = "") -> str:
    """/admin/adapters/{id}[/verb]; a legal id (`check_adapter_id`) holds nothing that needs quoting."""
    path = f"/admin/adapters/{adapter_id}"
    return f"{path}/{verb}" if verb else path
