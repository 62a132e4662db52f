"""The order of waiting requests. The folder is the list of policies: the name of a file is a value of --policy.

A policy is a file here with `class Policy(base.Policy)`, which overrides what it does otherwise; it is named nowhere
else. The contract tests run over all files (tests/contracts/test_policy.py).
"""

from __future__ import annotations

import importlib

from lora_serve.engine.policies.base import Policy, PolicyView


def create_policy(name: str, view: PolicyView) -> Policy:
    """The policy of file `name`."""
    policy: Policy = importlib.import_module(f"{__name__}.{name}").Policy(view)
    return policy
