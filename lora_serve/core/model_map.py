"""The names under which another server knows the models of this one: `--overflow-model-map`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lora_serve.core.setting_texts import check_text
from lora_serve.core.setting_types import parse_list
from lora_serve.core.strict_json import JsonError, parse_json

VERSION = "{version}"  # in a target: the number of the version that answers
MAX_FILE_BYTES = 2**24
_FORM = "expected NAME=NAME, a JSON object, or the path of a JSON or YAML file with such pairs"
Pairs = tuple[tuple[str, str], ...]


class ModelMap:
    """Names here -> names there. A `*` in a name stands for any text, and in its target for the same text."""

    def __init__(self, pairs: Pairs = ()) -> None:
        """Without pairs every model has the same name there."""
        pairs = pairs or (("*", "*"),)
        self._exact = {name: target for name, target in pairs if "*" not in name}
        patterns = [(*name.partition("*")[::2], target) for name, target in pairs if "*" in name]
        self._patterns = sorted(patterns, key=lambda pattern: -len(pattern[0] + pattern[1]))

    @property
    def targets(self) -> tuple[str, ...]:
        """The names there that are written out."""
        named = (target for target in self._exact.values() if target and VERSION not in target)
        return tuple(dict.fromkeys(named))

    def target(self, name: str, version: int | None = None, *, is_only: bool = True) -> str | None:
        """The name there of the model `name`; None: it is not asked for there.

        `version`: of an adapter. Unless it `is_only`, the one that the bare name means, the map must name it.
        """
        found = None if version is None else self._exact.get(f"{name}@{version}")
        if found is None:
            found = self._general(name)
            if found is None or (not is_only and VERSION not in found):
                return None
        return found.replace(VERSION, "" if version is None else str(version)) or None

    def _general(self, name: str) -> str | None:
        if (found := self._exact.get(name)) is not None:
            return found
        for before, after, target in self._patterns:
            if name.startswith(before) and name.endswith(after) and len(name) >= len(before) + len(after):
                return target.replace("*", name[len(before) : len(name) - len(after)])
        return None


def parse_model_map(value: Any) -> Any:
    """Pairs of names from texts, a mapping, or a file. Raises ValueError."""
    if isinstance(value, Mapping):
        return tuple(_pair(name, target) for name, target in value.items())
    if isinstance(value, str):
        value = [value] if value.lstrip().startswith("{") else parse_list(value)
    if not isinstance(value, list | tuple):
        raise ValueError(_FORM)
    return tuple(pair for item in value for pair in _pairs(item))


def _pairs(item: Any) -> Pairs:
    if isinstance(item, tuple | list) and len(item) == 2:
        return (_pair(*item),)
    if not isinstance(item, str):
        raise ValueError(_FORM)
    if item.lstrip().startswith("{"):
        try:
            found = parse_json(item.encode())
        except JsonError as error:
            raise ValueError(f"{_FORM} ({error.reason})") from None
    elif "=" in item:
        name, _, target = item.partition("=")
        return (_pair(name.strip(), target.strip()),)
    else:
        found = _in_file(Path(item))
    if not isinstance(found, dict):
        raise ValueError(_FORM)
    return tuple(_pair(name, target) for name, target in found.items())


def _in_file(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} is no file of at most {MAX_FILE_BYTES} bytes; {_FORM}")
        return yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _pair(name: Any, target: Any) -> tuple[str, str]:
    """One pair; an empty target, or null: the model is not asked for there."""
    target = "" if target is None else target
    if not isinstance(name, str) or not isinstance(target, str) or not name:
        raise ValueError(f"{_FORM}: {name!r:.100} and {target!r:.100} are no two names")
    check_text([name, *([target] if target else [])])
    if name.count("*") > 1 or target.count("*") > name.count("*"):
        raise ValueError(f"{name!r:.100}: one `*` may stand in a name, and then one in its target")
    return name, target
