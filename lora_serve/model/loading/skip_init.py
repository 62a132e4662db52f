"""Builds a model without numbers for what has no memory yet: a checkpoint fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Undrawn(TorchFunctionMode):
    """`torch.nn.init` leaves tensors of the meta device alone; what has memory is drawn as ever.

    `torch.arange` there would load torch's symbolic shapes, and sympy with them, to find out how long it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = named.get("tensor", args[0] if args else None)
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        if func is torch.arange and _is_meta(named.get("device")):
            return _unnumbered(*args, **named)
        return func(*args, **named)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _unnumbered(*args: Any, **named: Any) -> torch.Tensor:
    """A tensor of the meta device as `torch.arange` gives it, made of a range that is there."""
    found = torch.arange(*args, **{**named, "device": "cpu"})
    return torch.empty_like(found, device="meta")
