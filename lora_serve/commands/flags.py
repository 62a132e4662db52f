"""Arguments of commands: parsers with subcommands, flags that clients of the admin API share, types of values."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from lora_serve.commands.output import ExitCode
from lora_serve.core.adapter import check_adapter_id, check_new_adapter_id
from lora_serve.core.errors import ConfigError, InvalidRequestError
from lora_serve.core.flags import FlagParser, flag_name
from lora_serve.core.process import running_servers
from lora_serve.core.setting_texts import parse_bytes
from lora_serve.core.strict_json import JsonError, parse_json
from lora_serve.core.tenant import MAX_LIMIT, TENANT_LIMITS, check_tenant_name

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_STORE = "adapters_store"
DEFAULT_TIMEOUT = 120.0  # seconds
REQUIRED = ("adapter_config.json", "adapter_model.safetensors")
OPTIONAL = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
ARCHIVE_ENDINGS = (".tar", ".tar.gz", ".tgz", ".zip")
NONE = "none"  # of a limit
AddFlags = Callable[["argparse._ActionsContainer"], object]  # noqa: SLF001 (parsers and groups)
S = TypeVar("S", bound="Subcommand")


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand's help texts and arguments. `examples`: lines of --help, without the program's name."""

    name: str
    summary: str
    examples: tuple[str, ...]
    arguments: tuple[AddFlags, ...]


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


def make_parser(
    program: str, description: str, exit_codes: str, subcommands: Sequence[Subcommand], shared: AddFlags
) -> CommandParser:
    """A parser that sets `flags.verb` to the subcommand, None without one. `shared` adds every subcommand's flags."""
    parser = CommandParser(program, description, exit_codes)
    parser.set_defaults(verb=None)
    table = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", parser_class=CommandParser)
    for verb in subcommands:
        examples = "\n".join(f"  {program} {example}" for example in verb.examples)
        one = table.add_parser(
            verb.name, help=verb.summary, description=verb.summary, epilog=f"examples:\n{examples}\n\n{exit_codes}"
        )
        for add in (*verb.arguments, shared):
            add(one)
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


def argument(*names: str, **options: Any) -> AddFlags:
    """An argument in argparse's terms; without a default it is absent from the flags unless it is given."""
    return lambda parser: parser.add_argument(*names, **{"default": SUPPRESS, **options})


def one_of(*arguments: AddFlags, required: bool = False) -> AddFlags:
    """Arguments that exclude each other."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for one in arguments:
            one(group)

    return add


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


def limit(text: str) -> int | None:
    """A count, bytes as 512MiB, or "none". Raises ArgumentTypeError."""
    if text == NONE:
        return None
    try:
        number = int(parse_bytes(text))
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_LIMIT:
        _wrong(f"expected a number such as 100 or 512MiB, or {NONE} (got {text!r})")
    return number


def files_of(path: Path) -> dict[str, Path]:
    """Name in the form -> file: a folder's files, or one archive. Raises ConfigError."""
    if path.is_file():
        # The server looks at an archive's first bytes; the ending only says that it is one.
        return {"adapter" + next(filter(path.name.endswith, ARCHIVE_ENDINGS), ".tar"): path}
    if not path.is_dir():
        raise ConfigError(f"PATH: {path} is neither a folder nor an archive")
    if missing := [name for name in REQUIRED if not (path / name).is_file()]:
        is_pickle = (path / "adapter_model.bin").is_file()
        why = ": adapter_model.bin is a pickle, save the adapter as safetensors" if is_pickle else ""
        raise ConfigError(f"PATH: {path} holds no {' and no '.join(missing)}{why}")
    return {name: path / name for name in (*REQUIRED, *OPTIONAL) if (path / name).is_file()}


ID = argument("id", type=adapter_id, metavar="ID")
YES = argument("--yes", action="store_true", help="do not ask; needed where input is no terminal")
WAIT = argument("--wait", action="store_true", help="end well only once every --url shows the change, else exit with 1")
CSV = argument("--csv", action="store_true", help="comma-separated values instead of a table")
_COMMON = (
    argument("--url", action="append", type=server_url, metavar="URL",
        help=f"the server (LORA_SERVE_URL; default: the one that runs here, else {DEFAULT_URL}; what changes "
        "something is refused where several run); given more than once, the first is asked and --wait waits for all"),
    argument("--admin-key", metavar="KEY",
        help="the server's admin key (LORA_SERVE_ADMIN_KEY; default: the key file of the server's store)"),
    argument("--store", metavar="DIR",
        help="the server's store on this machine, which holds the key file (default, for a server here: the "
        f"one it was started with, else LORA_SERVE_STORE, else ./{DEFAULT_STORE})"),
    argument("--timeout", type=seconds, metavar="SECONDS",
        help=f"seconds to wait for an answer, and for --wait altogether (default: {DEFAULT_TIMEOUT:g})"),
    argument("--json", action="store_true",
        help="print the server's JSON, one document, and nothing else on standard output"),
)  # fmt: skip
_LIMITS = {
    "requests_per_minute": "requests that may begin within a minute",
    "tokens_per_minute": "tokens of prompts and answers within a minute",
    "max_running": "rows that run at the same time",
    "max_queued": "requests that wait at the same time",
    "max_adapters": "registered adapters",
    "max_stored_bytes": "bytes of all registered versions (as 512MiB)",
    "device_bytes_guaranteed": "bytes of device memory that others cannot take (as 512MiB)",
    "device_bytes_max": "bytes of device memory at most (as 512MiB)",
    "registrations_per_minute": "uploads and registrations that may begin within a minute",
}


def add_common_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the shared flags, which may stand before or after the subcommand."""
    group = parser.add_argument_group("flags of every subcommand")
    for add in _COMMON:
        add(group)


def add_tenant_limits(parser: argparse._ActionsContainer) -> None:
    """Adds a flag for each limit of a tenant; it becomes a field of the request's `quota`."""
    _add_limits(parser, _LIMITS)


def add_key_limits(parser: argparse._ActionsContainer) -> None:
    """Adds a flag for each limit that a key may have of its own."""
    _add_limits(parser, {name: text for name, text in _LIMITS.items() if name not in TENANT_LIMITS})


def _add_limits(parser: argparse._ActionsContainer, limits: dict[str, str]) -> None:
    group = parser.add_argument_group(f"limits ({NONE}: no limit)")
    for name, text in limits.items():
        argument(flag_name(name), dest=f"quota.{name}", type=limit, metavar="N", help=text)(group)
