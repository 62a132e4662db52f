"""The types that PEFT gives to settings whose values are not used, or must be empty: no other type is taken for them.

A setting that is used is checked where it is read (`peft_fields.Fields`). null is always allowed: PEFT writes it for
whatever was not set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from lora_serve.adapters.checkpoint.peft_fields import Fields, show

_FLAG, _NUMBER, _INTEGER, _TEXT, _TABLE, _LIST = (bool,), (int, float), (int,), (str,), (dict,), (list,)
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", dict: "a table", list: "a list"}
_NAMES: Mapping[tuple[type, ...], str] = {
    _FLAG: "decompose_both fan_in_fan_out inference_mode init_ia3_weights rank_dropout_scale use_effective_conv2d"
    " use_qalora use_rslora",
    _NUMBER: "beta1 beta2 d_initial lora_dropout module_dropout orth_reg_weight rank_dropout vera_dropout",
    _INTEGER: "decompose_factor deltaT qalora_group_size target_r tfinal tinit total_step",
    _TEXT: "base_model_name_or_path megatron_core peft_version revision",
    _TABLE: "alpha_pattern arrow_config auto_mapping corda_config eva_config kasa_config loftq_config lora_ga_config"
    " megatron_config monteclora_config runtime_config velora_config",
    _LIST: "layer_replication",
    (bool, str): "init_lora_weights init_weights",
    (bool, dict): "use_bdlora",
}
KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {name: kinds for kinds, names in _NAMES.items() for name in names.split()}
)


def check_kinds(fields: Fields) -> None:
    """Refuse settings of another type than PEFT's own."""
    fields.reasons += _wrong(fields.table)


def _wrong(table: Mapping[str, Any]) -> Iterator[str]:
    for name, kinds in KINDS.items():
        value = table.get(name)
        if value is not None and type(value) not in kinds:
            words = " or ".join(_WORDS[kind] for kind in kinds if kinds != _NUMBER or kind is float)
            yield f"{name} must be {words} (got {show(value)})"
