"""`lora-serve`: finds the command, whose module reads its flags and imports only what it needs.

Exit codes: 0 well, 1 the command's own failure, 2 a wrong command line, setting or model, 3 `serve` lost its engine
for good, 130 interrupted (Ctrl-C). `adapters`, `tenants`, `keys` and `registry` have more: their --help lists them.
"""

from __future__ import annotations

import importlib
import sys

from lora_serve import __version__
from lora_serve.core.errors import ConfigError, did_you_mean, start_error
from lora_serve.core.flags import flag_name
from lora_serve.logs import drop_import_noise

# Command: its arguments, what it does. Each is a module of lora_serve/commands with `run(arguments) -> exit code`, but
# for those that are a function of another one.
COMMANDS = {
    "serve": ("PATH_OR_HUB_ID [flags]", "start the server"),
    "fleet": ("PATH_OR_HUB_ID [flags]", "start the server with engines on Ray; fleet status, fleet stop"),
    "demo": ("[--port N] [--once | --traffic]", "serve the bundled model and adapters"),
    "check": ("ADAPTER_DIR | --base --model PATH", "validate an adapter, or a base, offline: what would be rejected"),
    "quantize": (
        "MODEL OUT [--to int4|int8|fp8]",
        "write a checkpoint with packed weights, as compressed-tensors has it",
    ),
    "adapters": ("SUBCOMMAND [flags]", "ask a running server: list, show, register, upload, route, canary, ..."),
    "tenants": ("SUBCOMMAND [flags]", "ask a running server: list, create, show, set, delete tenants"),
    "keys": ("SUBCOMMAND [flags]", "ask a running server: create, list, revoke a tenant's API keys"),
    "registry": ("SUBCOMMAND [flags]", "back up, restore, rebuild, move or check a registry, without a server"),
    "usage": ("[flags]", "what tenants used, as a table or CSV"),
    "audit": ("[flags]", "who did what over the admin API"),
    "bench": ("[--url URL | --spawn] [flags]", "send a load to this or another server, time every token, report"),
    "simulate": ("--trace FILE [flags]", "compare scheduling policies and routers on a trace, without a model"),
}
_FUNCTIONS = {
    **{command: ("tenancy", f"run_{command}") for command in ("tenants", "keys", "usage", "audit")},
    **{command: ("serve", f"run_{command}") for command in ("fleet", "check")},
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    drop_import_noise()
    try:
        return _run(given)
    except Exception as error:
        for line in str(start_error(error)).splitlines():
            print(f"lora-serve: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a server that is up ends by itself
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    match arguments:
        case []:
            print(_usage(), file=sys.stderr)
            return 2
        case ["-h" | "--help" | "help", *_]:
            print(_usage())
            return 0
        case ["-V" | "--version", *_]:
            print(__version__)
            return 0
        case [command, *rest] if command in COMMANDS:
            name, function = _FUNCTIONS.get(command, (command, "run"))
            code: int = getattr(importlib.import_module(f"lora_serve.commands.{name}"), function)(rest)
            return code
        case [command, *_]:
            names = importlib.import_module("lora_serve.core.settings").Settings.model_fields
            known = [*COMMANDS, *(f"serve {flag_name(name)}" for name in names)]
            near = did_you_mean(f"serve {command}" if command.startswith("-") else command, known)
            raise ConfigError(f"{command!r} is no command; there are {', '.join(COMMANDS)}{near}")
    raise AssertionError("a list is empty or has a first element")


def _usage() -> str:
    lines = [
        f"lora-serve {__version__}: one frozen base model, many tenants' LoRA adapters, one mixed-adapter batch.",
        "\nusage: lora-serve COMMAND [flags]\n",
        *(f"  {f'{command:8} {flags}':41} {summary}" for command, (flags, summary) in COMMANDS.items()),
        "\nlora-serve COMMAND --help explains a command's flags; lora-serve --version prints the version.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
