"""Floor 3, maths: torch. Pools of bytes and pure computation; no opinions about who runs when.

Backends: packages below whose files are the implementations of one seam, chosen by name or by preference. A file of
such a package has, beside its class,
    PREFERENCE          "auto" takes the file of the highest number that can serve; 0: only when named
    why_not(subject)    why it cannot serve; None: it can
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from lora_serve.core.errors import ConfigError


def backend_names(package: ModuleType) -> list[str]:
    """The files of a package, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load_backend(package: ModuleType, name: str, flag: str, subject: object) -> Any:
    """The module of file `name`; "auto": the preferred one that can serve `subject`. Raises ConfigError."""
    if name == "auto":
        modules = [importlib.import_module(f"{package.__name__}.{each}") for each in backend_names(package)]
        able = [module for module in modules if module.why_not(subject) is None]
        return max(able, key=lambda module: module.PREFERENCE)
    module = importlib.import_module(f"{package.__name__}.{name}")
    if (reason := module.why_not(subject)) is not None:
        raise ConfigError(f"{flag} {name}: {reason}")
    return module
