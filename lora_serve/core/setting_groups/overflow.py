"""Overflow: requests that would wait here for long are computed by neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from lora_serve.core.setting_texts import check_key, check_text, is_web_url
from lora_serve.core.setting_types import Texts, changed_flags, parse_list, setting
from lora_serve.core.strict_json import JsonError, parse_json

MAX_NEIGHBOURS = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
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


@dataclass(frozen=True, kw_only=True)
class OverflowConfig:
    """Neighbours that compute what would wait here for long."""

    overflow: Annotated[Texts, AfterValidator(_check_neighbours)] = setting(
        (),
        "URL, or NAME=URL, of another OpenAI-compatible server with the same base model and adapters: it "
        "computes requests that would wait here for long; repeatable",
    )
    overflow_after_ms: float = setting(
        1000.0,
        "milliseconds of predicted wait beyond which a request goes to a neighbour of --overflow",
        ge=0,
        le=3_600_000,
    )
    overflow_model_map: Annotated[Pairs, BeforeValidator(parse_model_map)] = setting(
        (),
        "pair NAME=NAME of a model here and at the neighbours (`*` stands for any text), or a JSON or YAML "
        "file of them; only what is named leaves; default: all models, under their own names; repeatable",
    )
    overflow_api_key: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(check_key)] | None = setting(
        None, "bearer key that the neighbours of --overflow are shown", repr=False
    )
    overflow_timeout_ms: float = setting(
        10_000.0,
        "milliseconds that a neighbour's first token may take at most; then the request is computed here",
        ge=100,
        le=3_600_000,
    )
    overflow_gap_ms: float = setting(
        10_000.0,
        "milliseconds between two tokens of a neighbour at most; then its answer is broken off",
        ge=10,
        le=3_600_000,
    )
    overflow_answer_ms: float = setting(
        600_000.0, "milliseconds that the whole answer of a neighbour may take", ge=100, le=86_400_000
    )

    @property
    def neighbours(self) -> tuple[tuple[str, str], ...]:
        """Name and URL of each; none: nothing leaves."""
        return tuple(map(neighbour_in, self.overflow))

    def check_overflow_together(self) -> None:
        """Raises ValueError."""
        if not self.overflow and (flags := changed_flags(self, OverflowConfig)):
            raise ValueError(f"--overflow: is required with {flags[0]}")


def _check_neighbours(value: tuple[str, ...]) -> tuple[str, ...]:
    neighbours = [neighbour_in(text) for text in value]
    if len(neighbours) > MAX_NEIGHBOURS:
        raise ValueError(f"expected at most {MAX_NEIGHBOURS} neighbours")
    for kind, found in (("name", [name for name, _ in neighbours]), ("URL", [url for _, url in neighbours])):
        if len(set(found)) < len(found):
            raise ValueError(f"two neighbours have one {kind}")
    return value


def neighbour_in(text: str) -> tuple[str, str]:
    """Name and URL in `URL` or `NAME=URL`; the name of a bare URL is its host and port. Raises ValueError."""
    name, equals, url = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
    parts = urlsplit(url) if is_web_url(url) else None
    if parts is None or not text.isascii() or " " in text or parts.query or parts.fragment:
        shown = text.rpartition("@")[2].partition("?")[0].partition("#")[0]  # a key may be in the rest
        raise ValueError(f"expected a URL such as http://10.0.0.7:8000, or NAME=URL, without a query: {shown!r:.200}")
    if "@" in parts.netloc:
        raise ValueError("a URL must hold no key: it goes into --overflow-api-key")
    if equals and not all(character.isalnum() or character in "._-" for character in name):
        raise ValueError(f"a neighbour's name has letters, digits and `._-` only: {name!r:.100}")
    return name or parts.netloc, url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_address_of(url: str, host: str, port: int) -> bool:
    """True if the URL is plainly that of a server that listens on `host` and `port`."""
    parts = urlsplit(url)
    there = parts.port or (443 if parts.scheme == "https" else 80)
    listens_here = host in (*_LOOPBACK, "0.0.0.0", "::", "")
    return there == port and (parts.hostname == host or (listens_here and parts.hostname in _LOOPBACK))
