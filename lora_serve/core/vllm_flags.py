"""Takes vLLM's flags from a command line: what means the same becomes our setting, the rest is noted or refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_serve.core.errors import ConfigError
from lora_serve.core.vllm_table import FLAGS, Fate, Takes, VllmFlag

MODEL = "MODEL"  # what stands alone on the line, as in `vllm serve MODEL`
VLLM_KEYS = {flag.name.removeprefix("--").replace("-", "_"): flag for flag in FLAGS}  # as keys of a YAML file
_SWITCHED = {True: "on", False: "off"}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags, which --help does not show, and the model that stands alone."""
    parser.add_argument(
        MODEL, nargs="?", default=argparse.SUPPRESS, help="folder or hub id of the base model, or a GGUF file"
    )
    for flag in FLAGS:
        names = [flag.name, flag.short] if flag.short else [flag.name]
        options: dict[str, Any] = {"dest": flag.dest, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        if flag.takes is Takes.SWITCH:
            options["action"] = argparse.BooleanOptionalAction
        elif flag.takes is Takes.MANY:
            options["nargs"] = "+"
        parser.add_argument(*names, **options)


def as_vllm_reads(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--max_loras` as `--max-loras`, and `--x.key VALUE` of a flag with JSON as `--x VALUE`."""
    known = {flag.name for flag in FLAGS}
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            whole, dot, _ = name.partition(".")
            name = whole if dot and whole in known else name
        found.append(f"{name}{equals}{value}")
    return found


def parsed_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """A YAML file's keys and values as if they had been parsed from a command line."""
    parsed = {}
    for name, value in content.items():
        flag = VLLM_KEYS.get(name)
        is_switch = flag is not None and flag.takes is Takes.SWITCH
        parsed[name if flag is None else flag.dest] = value != "off" if is_switch else value
    return parsed


def taken(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parsed arguments -> settings as given, and a line for each flag, or part of one, that means nothing here.

    Raises ConfigError with one line per refused flag.
    """
    dests = {flag.dest: flag for flag in FLAGS}
    settings = {name: value for name, value in given.items() if name not in dests and name != MODEL}
    ours = [(dests[dest], value) for dest, value in given.items() if dest in dests]
    lines = [*_model(given, settings), *(line for flag, value in ours for line in _refusals(flag, value))]
    if lines:
        raise ConfigError("\n".join(lines))
    notes = [f"{flag.name} means nothing here: {flag.why}" for flag, _ in ours if flag.fate is Fate.IGNORED]
    for flag, value in sorted(ours, key=lambda item: FLAGS.index(item[0])):
        if flag.fate is Fate.MEANT and (meant := _meaning(flag, value)):
            stand = {name: _shown(settings.setdefault(_key(name), meant)) for name in (flag.setting, *flag.also)}
            others = [f"{name} {stands[:100]}" for name, stands in stand.items() if stands != meant]
            notes += [f"{flag.name} means nothing here: {other} is given, too" for other in others]
            if not others and flag.ignored is not None and (ignored := flag.ignored(_shown(value))):
                notes.append(f"{flag.name} means nothing here in {ignored}")
    return settings, tuple(notes)


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _model(given: Mapping[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    """Makes the model that stands alone a setting; yields what is wrong with it."""
    if MODEL not in given:
        return
    named = settings.setdefault("model", given[MODEL])
    if named != given[MODEL]:
        yield f"{given[MODEL][:200]}: a second model, beside --model {named[:200]}"


def _refusals(flag: VllmFlag, value: Any) -> Iterator[str]:
    shown = _shown(value)
    if flag.fate is Fate.REFUSED and value is not False and shown not in flag.harmless:
        advice = f"; what may be given is {' or '.join(filter(None, flag.harmless))}" if any(flag.harmless) else ""
        advice += f"; use {flag.setting} {shown[:100]}" if flag.setting else ""
        yield f"{_as_given(flag, value)}: vLLM's flag would change answers or do nothing here: {flag.why}{advice}"
    if flag.read is not None:
        try:
            flag.read(shown)
        except ValueError as error:
            yield f"{_as_given(flag, value)}: {error}"
    if flag.fate is Fate.MEANT and flag.values and shown not in flag.values:
        yield f"{_as_given(flag, value)}: what may be given is {', '.join(flag.values)}; {flag.why}"


def _meaning(flag: VllmFlag, value: Any) -> str:
    shown = _shown(value)
    return flag.read(shown) if flag.read is not None else flag.values[shown] if flag.values else shown


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return _SWITCHED[value]
    return " ".join(value) if isinstance(value, list) else str(value)


def _as_given(flag: VllmFlag, value: Any) -> str:
    return flag.name if isinstance(value, bool) else f"{flag.name} {_shown(value)[:100]}"
