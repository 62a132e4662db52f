"""`lora-serve`: reads the command line, then imports only what the command needs, so --help and mistakes are fast.

Exit codes: 0 well, 1 the command's own failure, 2 a wrong command line, setting or model, 3 `serve` lost its engine
for good. `adapters`, `tenants`, `keys` and `registry` have more: their --help lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from lora_serve import __version__
from lora_serve.core.errors import ConfigError, LoraServeError
from lora_serve.logs import drop_import_noise

USAGE = f"""lora-serve {__version__}: one frozen base model, many tenants' LoRA adapters, one mixed-adapter batch.

usage: lora-serve COMMAND [flags]

  serve   --model PATH_OR_HUB_ID [flags]     start the server
  demo    [--port N] [--once]                serve the bundled model and adapters
  check   ADAPTER_DIR --model PATH           validate an adapter offline: what would be rejected, and why
  adapters SUBCOMMAND [flags]                ask a running server: list, show, register, upload, route, canary, ...
  tenants SUBCOMMAND [flags]                 ask a running server: list, create, show, set, delete tenants
  keys    SUBCOMMAND [flags]                 ask a running server: create, list, revoke a tenant's API keys
  registry SUBCOMMAND [flags]                back up, restore, rebuild, move or check a registry, without a server
  usage   [flags]                            what tenants used, as a table or CSV
  audit   [flags]                            who did what over the admin API
  bench   [--url URL | --spawn] [flags]      send a load to this or another server, time every token, report

lora-serve COMMAND --help explains a command's flags; lora-serve --version prints the version."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    drop_import_noise()
    try:
        return _run(given)
    except LoraServeError as error:
        for line in str(error).splitlines():
            print(f"lora-serve: error: {line}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "demo": _demo,
        "check": _check,
        "adapters": _adapters,
        "tenants": _tenants,
        "keys": _keys,
        "registry": _registry,
        "usage": _usage,
        "audit": _audit,
        "bench": _bench,
    }
    match arguments:
        case []:
            print(USAGE, file=sys.stderr)
            return 2
        case ["-h" | "--help" | "help", *_]:
            print(USAGE)
            return 0
        case ["-V" | "--version", *_]:
            print(__version__)
            return 0
        case [command, *rest] if command in commands:
            return commands[command](rest)
        case [command, *_]:
            raise ConfigError(f"{command!r} is no command; there are {', '.join(commands)}")
    raise AssertionError("a list is empty or has a first element")


def _serve(arguments: list[str]) -> int:
    from lora_serve.core.settings import load_settings
    from lora_serve.logs.streams import open_standard_descriptors

    open_standard_descriptors()
    settings = load_settings(arguments)
    if settings.engine == "process":
        from lora_serve.without_torch import import_tokenizers

        import_tokenizers()
    else:
        from lora_serve.model.lean_imports import import_transformers

        import_transformers(settings.quantization, settings.model)
    from lora_serve import launch

    return launch.serve(settings)


def _demo(arguments: list[str]) -> int:
    from lora_serve.core.flags import FlagParser

    parser = FlagParser("lora-serve demo", "Serve the bundled model and its tenants' adapters.", {})
    parser.add_argument("--port", default="8000", metavar="N", help="TCP port (default: 8000)")
    parser.add_argument("--once", action="store_true", help="exit after the answers")
    values = parser.values(arguments)
    port = str(values["port"])
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--port: expected a number from 0 to 65535 (got {port!r})")
    from lora_serve import demo

    return demo.main(port=int(port), once=bool(values["once"]))


def _check(arguments: list[str]) -> int:
    from lora_serve.core.settings import resolve_settings, settings_parser

    parser = settings_parser("lora-serve check", "Validate an adapter: what the server would reject, and why.")
    parser.add_argument("adapter_dir", metavar="ADAPTER_DIR", help="folder with adapter_config.json and its weights")
    values = parser.values(arguments)
    folder = Path(values.pop("adapter_dir"))
    settings = resolve_settings(values)
    if not folder.is_dir():
        raise ConfigError(f"ADAPTER_DIR: {folder} is not a folder")
    from lora_serve import adapter_check

    return adapter_check.run(folder, settings)


def _adapters(arguments: list[str]) -> int:
    from lora_serve.commands.adapters import run

    return run(arguments)


def _tenants(arguments: list[str]) -> int:
    from lora_serve.commands.tenants import run

    return run(arguments)


def _keys(arguments: list[str]) -> int:
    from lora_serve.commands.keys import run

    return run(arguments)


def _registry(arguments: list[str]) -> int:
    from lora_serve.commands.registry import run

    return run(arguments)


def _usage(arguments: list[str]) -> int:
    from lora_serve.commands.usage import run

    return run(arguments)


def _audit(arguments: list[str]) -> int:
    from lora_serve.commands.audit import run

    return run(arguments)


def _bench(arguments: list[str]) -> int:
    from lora_serve.commands.bench.command import run

    return run(arguments)
