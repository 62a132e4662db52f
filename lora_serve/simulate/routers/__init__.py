"""The choice of the replica that answers. The folder is the list of routers: a file's name is a value of --router."""

from __future__ import annotations

import importlib
import pkgutil

from lora_serve.simulate.routers.base import Router


def create_router(name: str, num_replicas: int) -> Router:
    """The router of file `name`."""
    router: Router = importlib.import_module(f"{__name__}.{name}").Router(num_replicas)
    return router


def router_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
