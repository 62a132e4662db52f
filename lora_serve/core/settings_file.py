"""The YAML file of `--config`: a flat mapping of settings, kebab-case or with underscores."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from lora_serve.core.errors import ConfigError

MAX_BYTES = 2**20


def read_settings_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Field name -> value. Raises ConfigError if the file is missing, is not such a mapping, or names no setting."""
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > MAX_BYTES):
            raise ConfigError(f"--config: {path} is no file of at most {MAX_BYTES} bytes")
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold a mapping such as `max-num-seqs: 64`")
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known or name == "config":
            raise ConfigError(f"--config: {path}: there is no setting {str(key)[:64]!r}")
        # YAML 1.1 reads a bare on or off as a boolean; settings that are booleans take the words as well.
        values[name] = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return values
