"""The choice of the replica that answers. The folder is the list of routers: a file's name is a value of --router.

A router is a file here with `class Router(base.Router)`; it is named nowhere else. The contract tests run over all
files (tests/contracts/test_router.py).
"""

from __future__ import annotations

import importlib

from lora_serve.routing.routers.base import Router


def create_router(name: str, seed: int = 0) -> Router:
    """The router of file `name`; each gateway of a fleet gives another seed, so that they do not choose in step."""
    router: Router = importlib.import_module(f"{__name__}.{name}").Router(seed)
    return router
