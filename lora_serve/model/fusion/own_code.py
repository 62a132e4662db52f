"""What a layer's own code names. A probe of a few tokens cannot see what a layer does only to large numbers or at far
positions (clamps, scales that set in after thousands of tokens); but whoever does such things names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def names_only(module: nn.Module, known: frozenset[str]) -> bool:
    """Whether the module's forward, and the methods of its own that it calls, use no other attributes and globals."""
    if "forward" in vars(module):
        return False
    waiting, seen = ["forward"], set[str]()
    while waiting:
        code = _code(getattr(type(module), waiting.pop()))
        if code is None:
            return False
        new = set(code.co_names) - seen
        seen |= new
        waiting += [name for name in new if callable(_method(module, name))]
    return seen <= known


def _method(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """A method that the module's class brings beyond those of every module."""
    found = getattr(type(module), name, None)
    return found if found is not getattr(nn.Module, name, None) else None


def _code(function: Any) -> Any:
    return getattr(inspect.unwrap(function), "__code__", None)
