"""Who is tried first: one file per policy, its name is the value of --policy; `base.py` is their seam."""

from __future__ import annotations

import importlib

from lora_serve.engine.policies.base import Policy, PolicyView


def create_policy(name: str, view: PolicyView) -> Policy:
    """The policy of file `name`."""
    policy: Policy = importlib.import_module(f"{__name__}.{name}").Policy(view)
    return policy
