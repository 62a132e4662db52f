"""The order of waiting requests. The folder is the list of policies: the name of a file is a value of --policy.

A policy is a file here with `class Policy(base.Policy)`, which overrides what it does otherwise; it is named nowhere
else. The contract tests run over all files (tests/contracts/test_policy.py).
"""

from __future__ import annotations

import importlib
import pkgutil

from lora_serve.engine.policies.base import Policy, PolicyView


def policy_names() -> list[str]:
    """All policies, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def create_policy(name: str, view: PolicyView) -> Policy:
    """The policy of file `name`."""
    policy: Policy = importlib.import_module(f"{__name__}.{name}").Policy(view)
    return policy
