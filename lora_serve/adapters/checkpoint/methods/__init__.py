"""PEFT methods other than LoRA whose layers can be served exactly, one file each.

    config = method.parse(adapter_config)           what the file says, or InvalidAdapterError
    plan = method.plan(config, targets)             for this base model's targeted layers: patterns matched once
    rank = method.bind(plan, module, shapes, ...)   from shapes alone
    method.factors(plan, module, tensors, ...)      LoRA factors: delta_W = scale * b.T @ a, algebra and no SVD

Numpy alone, so that checking an adapter loads no torch (saved.py has what needs torch).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from lora_serve.adapters.checkpoint.methods import adalora, ia3, loha, lokr, vera
from lora_serve.adapters.checkpoint.methods.factors import Arrays, Factors, Shapes
from lora_serve.adapters.checkpoint.methods.ia3 import Gains
from lora_serve.core.model_spec import LinearShape


class Method(Protocol):
    """Matches a module of this package. A plan is the method's own frozen type: hand it back as it came."""

    PEFT_TYPE: str
    HARMLESS: frozenset[str]  # settings beyond the shared ones (peft_fields.SHARED) that change nothing
    UNDERSTOOD: frozenset[str]
    ROLES: re.Pattern[str]  # a tensor's name to groups `module` (None: one for the whole model) and `role`

    def parse(self, table: Mapping[str, Any]) -> Any:
        """Raises InvalidAdapterError with every reason found."""

    def plan(self, config: Any, targets: Mapping[str, LinearShape]) -> Any:
        """`targets`: the base model's linear layers that the config means. Raises InvalidAdapterError."""

    def bind(self, plan: Any, module: str, shapes: Shapes, in_features: int, out_features: int) -> int | list[str]:
        """The exact factors' rank, or why the shapes do not fit. `shapes`: the module's and the model's own roles."""


class LowRankMethod(Method, Protocol):
    """delta_W is a low-rank matrix."""

    def factors(self, plan: Any, module: str, tensors: Arrays, in_features: int, out_features: int) -> Factors:
        """For shapes that `bind` accepted. Raises InvalidAdapterError if a product leaves float32's range."""


class GainMethod(Method, Protocol):
    """The layer's inputs or outputs are scaled."""

    def gains(self, plan: Any, module: str, tensors: Arrays) -> Gains:
        """For shapes that `bind` accepted."""


METHODS: Mapping[str, LowRankMethod] = MappingProxyType(
    {adalora.PEFT_TYPE: adalora, loha.PEFT_TYPE: loha, lokr.PEFT_TYPE: lokr, vera.PEFT_TYPE: vera}
)
GAIN_METHODS: Mapping[str, GainMethod] = MappingProxyType({ia3.PEFT_TYPE: ia3})


def sort_tensors(
    method: Method, tensors: Iterable[str], targets: Mapping[str, LinearShape]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """module ("": the whole model) -> role -> tensor, and the reasons why tensors are refused."""
    names: dict[str, dict[str, str]] = {}
    reasons = []
    for name in tensors:
        match = method.ROLES.match(name)
        module = "" if match is None else match["module"] or ""
        if match is None or (module and module not in targets):
            reasons.append(f"tensor {name[:200]!r} belongs to no layer that the config targets")
        elif match["role"] in names.setdefault(module, {}):
            reasons.append(f"tensor {name[:200]!r} is there twice under two names")
        else:
            names[module][match["role"]] = name
    return names, reasons
