"""`lora-serve serve`: the server, until a signal ends it. `fleet`: the same with engines on Ray, and what can be asked
of a fleet that runs. `check`: an adapter tried with a server's settings.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

FLEET = "lora-serve fleet"
SUBCOMMANDS = {  # name: its arguments, what it does
    "status": ("[--url URL]", "ask a running server: the replicas, their load and their state"),
    "stop": ("--ray-address A [--fleet-name N]", "remove a fleet's engines from a Ray cluster that was joined"),
}
_ENTRANCES = ("transformers", "transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils")


def run(arguments: list[str]) -> int:
    """Reads the settings, imports only the libraries that they need, then serves. Returns the exit code."""
    from lora_serve.core.process import without_collections

    with without_collections():
        from lora_serve.core.settings import command_line
        from lora_serve.logs.writer import open_standard_descriptors
        from lora_serve.model.system.process import load_torch_library, read_weights

        open_standard_descriptors()
        settings, notes = command_line(arguments)
        if settings.quantization == "none":  # else what was made of them may be read in their place
            read_weights(settings.model)
        if settings.engine in ("process", "ray"):
            from lora_serve.app.early_checks import check_start

            check_start(settings)
            import_tokenizers()
        else:
            load_torch_library()
            from lora_serve.app.early_checks import check_start

            check_start(settings)
            from lora_serve.model.loading.transformers_import import import_transformers

            import_transformers(settings.quantization, settings.model)
        from lora_serve.app import launch

        gc.freeze()
    return launch.serve(settings, notes)


def import_tokenizers() -> None:
    """Imports transformers' tokenizers as if torch were not installed, for a server whose engine runs in another
    process; to be called once, before anything imports transformers.
    """
    assert "torch" not in sys.modules, "it is too late"
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning that models need torch
    for name in _ENTRANCES:
        importlib.import_module(name)


def run_fleet(arguments: list[str]) -> int:
    """Serves, or runs a subcommand; returns the exit code. Raises ConfigError."""
    match arguments:
        case [name, *rest] if name in SUBCOMMANDS:
            from lora_serve.commands import fleet_members

            return fleet_members.show(rest) if name == "status" else fleet_members.stop(rest)
        case ["-h" | "--help" | "help", *_]:
            print(_fleet_help())  # noqa: T201
            return 0
        case [name, *_]:
            _check_typo(name)
    _check_engine(arguments)
    return run(["--engine", "ray", *arguments])


def _check_typo(name: str) -> None:
    import difflib

    from lora_serve.core.errors import ConfigError

    near = difflib.get_close_matches(name, SUBCOMMANDS, n=1, cutoff=0.7)
    if near and not Path(name).exists():
        words = f"did you mean `{FLEET} {near[0]}`? (A hub's model of that name: --model {name})"
        raise ConfigError(f"{name!r} is no subcommand and no folder; {words}")


def _check_engine(arguments: list[str]) -> None:
    from lora_serve.core.errors import ConfigError

    for argument, value in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, joined = argument.partition("=")
        if name == "--engine" and (joined if equals else value) != "ray":
            raise ConfigError(f"--engine {joined or value}: a fleet is --engine ray; `lora-serve serve` takes any")


def _fleet_help() -> str:
    from dataclasses import fields

    from lora_serve.core.flags import FlagParser
    from lora_serve.core.setting_groups.operation import FleetSettings
    from lora_serve.core.settings import Settings

    lines = [f"  {FLEET} {f'{name} {flags}':41} {summary}" for name, (flags, summary) in SUBCOMMANDS.items()]
    flags = FlagParser(
        FLEET, "", {field.name: Settings.model_fields[field.name] for field in fields(FleetSettings)}
    ).format_help()
    options = flags[flags.index("options:") :].replace("options:", "flags of the fleet:", 1)
    return "\n".join([_HEAD.strip(), "", *lines, "", options.strip(), "", _TAIL.strip()])


_HEAD = f"""
usage: {FLEET} PATH_OR_HUB_ID [flags]

Serve with engines on Ray, each with the whole model: the same as `lora-serve serve --engine ray`. It needs Ray:
pip install 'lora-serve[ray]'.
"""
_TAIL = f"""
All other flags are those of `lora-serve serve --help`; variables and the file of --config work alike.

examples:
  {FLEET} ./llama --replicas 4
  {FLEET} ./llama --replicas 2..16 --device cuda --ray-address 10.0.0.5:6379 --redis-url redis://r
  {FLEET} status
  {FLEET} stop --ray-address 10.0.0.5:6379
"""


def run_check(arguments: list[str]) -> int:
    """Validates an adapter against a base model, or the base model, with no server running: prints what a server with
    these settings would do. Returns the exit code.
    """
    from lora_serve.core.errors import ConfigError
    from lora_serve.core.settings import resolve_settings, settings_parser

    parser = settings_parser("lora-serve check", "Validate an adapter: what the server would reject, and why.")
    parser.add_argument(
        "adapter_dir", metavar="ADAPTER_DIR", nargs="?", help="folder with adapter_config.json and its weights"
    )
    parser.add_argument("--base", action="store_true", help="try the base model instead, without its weights")
    values = parser.values(arguments)
    given, is_base = values.pop("adapter_dir"), values.pop("base")
    folder, settings = Path(given or ""), resolve_settings(values)
    if is_base == (given is not None):
        raise ConfigError("check: give either ADAPTER_DIR or --base")
    if not is_base and not folder.is_dir():
        raise ConfigError(f"ADAPTER_DIR: {folder} is not a folder")
    from lora_serve.app.early_checks import check_hub
    from lora_serve.commands import adapter_check

    check_hub(settings.model)
    return adapter_check.run_base(settings) if is_base else adapter_check.run(folder, settings)
