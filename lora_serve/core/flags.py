"""Command line flags made from a settings class's fields: one flag per field, described once."""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin

from lora_serve.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # a client of the admin API starts without it
    from pydantic.fields import FieldInfo

_METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}
ON_CUDA = "on_cuda"  # in a field's `json_schema_extra`: its default where the model runs on a GPU
_UNITS = ("milliseconds", "seconds", "days", "bytes")  # with which the description of a number begins


class FlagParser(argparse.ArgumentParser):
    """An argument parser that leaves values as text (the settings class checks them) and raises ConfigError."""

    def __init__(self, program: str, description: str, fields: Mapping[str, FieldInfo]) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        for name, field in fields.items():
            self._add_flag(name, field)

    def values(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Only what was given. Raises ConfigError for an unknown flag or a missing value."""
        namespace, unknown = self.parse_known_args(list(arguments))
        if unknown:
            raise ConfigError(self._unknown(unknown[0]))
        return {name: value for name, value in vars(namespace).items() if value is not argparse.SUPPRESS}

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)  # a subcommand, or a flag's value
        near = did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        raise ConfigError(message.removeprefix("argument ") + near)

    def _add_flag(self, name: str, field: FieldInfo) -> None:
        flag = flag_name(name)
        kinds = list(_leaves(field.annotation))
        unit = next((unit.upper() for unit in _UNITS if (field.description or "").startswith(unit)), None)
        metavar = unit if unit and kinds[0] in (int, float) else _metavar(kinds)
        help_text = f"{field.description}{_default(field)}".replace("%", "%%")
        options: dict[str, Any] = {"metavar": metavar}
        if bool in kinds:
            options = {"action": argparse.BooleanOptionalAction}
        elif any(get_origin(kind) is tuple for kind in _members(field.annotation)):
            options |= {"nargs": "+", "action": "extend"}
        self.add_argument(flag, help=help_text, default=argparse.SUPPRESS, **options)

    def _unknown(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        shown = [name for name, action in self._option_string_actions.items() if action.help is not argparse.SUPPRESS]
        return f"{flag}: there is no such flag" + (did_you_mean(flag, shown) or "; --help lists them")


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, without None; the annotation itself if it is none."""
    if get_origin(annotation) in (Union, types.UnionType):
        yield from (member for member in get_args(annotation) if member is not type(None))
    else:
        yield annotation


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types below unions, tuples and Annotated; Literals stay whole."""
    for member in _members(annotation):
        origin = get_origin(member)
        if origin is tuple or hasattr(member, "__metadata__"):
            yield from _leaves(get_args(member)[0])
        else:
            yield member


def _metavar(kinds: list[Any]) -> str:
    for kind in kinds:
        if get_origin(kind) is Literal:
            return "{" + ",".join(map(str, get_args(kind))) + "}"
    return _METAVARS.get(kinds[0], "VALUE")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return " (required)"
    if field.default is None or field.default == ():
        return ""
    is_mebibytes = isinstance(field.default, int) and field.default >= 2**20 and field.default % 2**20 == 0
    shown = f"{field.default // 2**20}MiB" if is_mebibytes else f"{field.default}"
    on_cuda = default_on_cuda(field)
    return f" (default: {shown})" if on_cuda is None else f" (default: {shown}; on a GPU {on_cuda})"


def default_on_cuda(field: FieldInfo) -> Any:
    """The default of a setting where the model runs on a GPU; None: that of everywhere."""
    extra = field.json_schema_extra
    return extra.get(ON_CUDA) if isinstance(extra, dict) else None
