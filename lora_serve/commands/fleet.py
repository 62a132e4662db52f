"""`lora-serve fleet`: a server with its engines on Ray, and what can be asked of a fleet that runs."""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path

PROGRAM = "lora-serve fleet"
SUBCOMMANDS = {  # name: its arguments, what it does
    "status": ("[--url URL]", "ask a running server: the replicas, their load and their state"),
    "stop": ("--ray-address A [--fleet-name N]", "remove a fleet's engines from a Ray cluster that was joined"),
}


def run(arguments: list[str]) -> int:
    """Serves, or runs a subcommand; returns the exit code. Raises ConfigError."""
    match arguments:
        case [name, *rest] if name in SUBCOMMANDS:
            from lora_serve.commands import fleet_members

            return fleet_members.show(rest) if name == "status" else fleet_members.stop(rest)
        case ["-h" | "--help" | "help", *_]:
            print(_help())  # noqa: T201
            return 0
        case [name, *_]:
            _check_typo(name)
    from lora_serve.commands import serve

    _check_engine(arguments)
    return serve.run(["--engine", "ray", *arguments])


def _check_typo(name: str) -> None:
    from lora_serve.core.errors import ConfigError

    near = difflib.get_close_matches(name, SUBCOMMANDS, n=1, cutoff=0.7)
    if near and not Path(name).exists():
        words = f"did you mean `{PROGRAM} {near[0]}`? (A hub's model of that name: --model {name})"
        raise ConfigError(f"{name!r} is no subcommand and no folder; {words}")


def _check_engine(arguments: list[str]) -> None:
    from lora_serve.core.errors import ConfigError

    for argument, value in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, joined = argument.partition("=")
        if name == "--engine" and (joined if equals else value) != "ray":
            raise ConfigError(f"--engine {joined or value}: a fleet is --engine ray; `lora-serve serve` takes any")


def _help() -> str:
    from lora_serve.core.flags import FlagParser
    from lora_serve.core.setting_groups.operation import FleetSettings
    from lora_serve.core.settings import Settings

    lines = [f"  {PROGRAM} {f'{name} {flags}':41} {summary}" for name, (flags, summary) in SUBCOMMANDS.items()]
    flags = FlagParser(
        PROGRAM, "", {field.name: Settings.model_fields[field.name] for field in fields(FleetSettings)}
    ).format_help()
    options = flags[flags.index("options:") :].replace("options:", "flags of the fleet:", 1)
    return "\n".join([_HEAD.strip(), "", *lines, "", options.strip(), "", _TAIL.strip()])


_HEAD = f"""
usage: {PROGRAM} PATH_OR_HUB_ID [flags]

Serve with engines on Ray, each with the whole model: the same as `lora-serve serve --engine ray`. It needs Ray:
pip install 'lora-serve[ray]'.
"""
_TAIL = f"""
All other flags are those of `lora-serve serve --help`; variables and the file of --config work alike.

examples:
  {PROGRAM} ./llama --replicas 4
  {PROGRAM} ./llama --replicas 2..16 --device cuda --ray-address 10.0.0.5:6379 --redis-url redis://r
  {PROGRAM} status
  {PROGRAM} stop --ray-address 10.0.0.5:6379
"""
