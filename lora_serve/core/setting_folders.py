"""Folders and files among the settings: those that are not there are told before anything heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lora_serve.core.errors import ConfigError
from lora_serve.core.flags import flag_name

_HUB_ID = re.compile(r"(?=.{1,200}\Z)[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class NamesFiles(Protocol):
    """The settings that name folders and files, beside those of TLS."""

    @property
    def model(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def adapter_root(self) -> tuple[Path, ...]: ...
    @property
    def lora_modules(self) -> tuple[str, ...]: ...


def check_folders(settings: NamesFiles) -> None:
    """Refuse folders that are not there before anything heavy is imported. Raises ConfigError."""
    model = Path(settings.model)
    if is_there(model.is_dir):
        if not is_there((model / "config.json").is_file):
            raise ConfigError(f"--model: {_shown(settings.model)} holds no config.json, so it is not a model folder")
    elif (
        is_there(model.exists)
        or not _HUB_ID.fullmatch(settings.model)
        or ("/" in settings.model and is_there(model.parent.is_dir))
    ):
        raise ConfigError(f"--model: {_shown(settings.model)} is neither a folder nor a hub id such as org/name")
    template = settings.chat_template
    if template is not None and "{" not in template and not is_there(Path(template).is_file):
        raise ConfigError(f"--chat-template: {_shown(template)} is neither a file nor a template")
    for root in settings.adapter_root:
        if not is_there(root.is_dir):
            raise ConfigError(f"--adapter-root: {_shown(root)} is not a folder")
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        file = getattr(settings, name)
        if file is not None and not is_there(file.is_file):
            raise ConfigError(f"{flag_name(name)}: {_shown(file)} is not a file")
    for item in settings.lora_modules:
        path = item.partition("=")[2]
        if "://" not in path and not is_there(Path(path).is_dir):
            hint = f"; on the hub it is hf://{path}" if "/" in path and _HUB_ID.fullmatch(path) else ""
            raise ConfigError(f"--lora-modules: {_shown(path)} is not a folder (got {_shown(item)}){hint}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_there(asked: Callable[[], bool]) -> bool:
    """True if `asked` says so; a name that no file can have is one that is not there, too."""
    try:
        return asked()
    except (OSError, ValueError):
        return False
