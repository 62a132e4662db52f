"""Which replica answers: one file per router, its name is the value of --router; `base.py` is their seam."""

from __future__ import annotations

import importlib
import pkgutil

from lora_serve.simulate.routers.base import Router


def create_router(name: str, num_replicas: int) -> Router:
    """The router of file `name`."""
    router: Router = importlib.import_module(f"{__name__}.{name}").Router(num_replicas)
    return router


def router_names() -> list[str]:
    """All there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
