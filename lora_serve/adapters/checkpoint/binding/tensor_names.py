"""How PEFT names an adapter's tensors: `base_model.model.` MODULE `.` what it is there."""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "base_model.model."
_ADAPTER = r"(?:\.default)?"  # older files keep the adapter's name inside
_ROLES = tuple(
    (role, re.compile(rf"(?P<module>.+)\.{pattern}\Z"))
    for role, pattern in (
        ("lora_A", rf"lora_A{_ADAPTER}\.weight"),
        ("lora_B", rf"lora_B{_ADAPTER}\.weight"),
        ("lora_bias", rf"lora_B{_ADAPTER}\.bias"),
        ("magnitude", rf"lora_magnitude_vector{_ADAPTER}(?:\.weight)?"),
        ("embedding_A", rf"lora_embedding_A{_ADAPTER}"),
        ("embedding_B", rf"lora_embedding_B{_ADAPTER}"),
        ("tokens", rf"token_adapter\.trainable_tokens_delta{_ADAPTER}"),
    )
)
_INNER = r"(?P<inner>(?:\.[^.]+)*)"  # inside a module that was trained whole, such as a head of two layers
_PARAMETER = re.compile(rf"(?P<module>.+?)(?:\.modules_to_save{_ADAPTER}{_INNER})?\.(?P<parameter>[^.]+)\Z")
_ORIGINAL = re.compile(rf"(?P<module>.+)\.original_module{_INNER}\.(?P<parameter>[^.]+)\Z")
_WRAPPER = ".base_layer"
_TOKENS_WRAPPER = ".token_adapter.base_layer"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor belongs. `depth` counts the wrappers (".base_layer") that PEFT put around the module."""

    module: str
    role: str  # one of _ROLES, "parameter": it replaces the module's own, or "original": it is what was replaced
    parameter: str = ""
    depth: int = 0


def place_of(name: str) -> TensorPlace | None:
    """The place of the tensor `name`; None: nothing PEFT would write."""
    path = name.removeprefix(PREFIX)
    for role, pattern in _ROLES:
        match = pattern.match(path)
        if match is not None:
            return _place(match["module"], role)
    match = _ORIGINAL.match(path)
    if match is not None:
        return _place(match["module"] + match["inner"], "original", match["parameter"])
    match = _PARAMETER.match(path)
    return (
        None
        if match is None or "lora_" in match["parameter"]
        else _place(match["module"] + (match["inner"] or ""), "parameter", match["parameter"])
    )


def _place(module: str, role: str, parameter: str = "") -> TensorPlace:
    module = module.removesuffix(_TOKENS_WRAPPER)
    return TensorPlace(module.replace(_WRAPPER, ""), role, parameter, module.count(_WRAPPER))
