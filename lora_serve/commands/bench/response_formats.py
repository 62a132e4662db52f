"""The value of --response-format: `json_object`, or schemas from a file or a folder, for the requests in turn."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_serve.core.strict_json import JsonError, parse_json

_KINDS = ("text", "json_object", "json_schema", "structural_tag")
ResponseFormats = tuple[Mapping[str, Any], ...]


def response_formats(text: str) -> ResponseFormats:
    """A format for each schema of a file (one, or a list), or of a folder's files. Raises ArgumentTypeError."""
    if text == "json_object":
        return ({"type": text},)
    path = Path(text)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = tuple(_format(value, file.stem) for file in files for value in _values(file))
    if not found:
        raise argparse.ArgumentTypeError(f"{text[:200]} holds no schema")
    return found


def _values(file: Path) -> list[Any]:
    try:
        value = parse_json(file.read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{str(file)[:200]}: {error.strerror}; or say json_object") from None
    except JsonError as error:
        raise argparse.ArgumentTypeError(f"{str(file)[:200]} {error}") from None
    return value if isinstance(value, list) else [value]


def _format(value: Any, name: str) -> Mapping[str, Any]:
    """A response_format as it is; a schema as one."""
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{name[:200]}: expected JSON schemas, which are objects")
    is_format = value.get("type") in _KINDS
    return value if is_format else {"type": "json_schema", "json_schema": {"name": name[:64], "schema": value}}
