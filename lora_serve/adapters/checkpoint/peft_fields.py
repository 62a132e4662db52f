"""Takes values out of a parsed adapter_config.json and collects what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard, TypeVar

from lora_serve.adapters.checkpoint.module_patterns import RankRules, ranks_and_scales
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import LinearShape

T = TypeVar("T")
MAX_PATTERNS = 4096
MAX_LAYER_NAMES = 64  # of layers_pattern; each is a regex, looked for in every module's path
_LAYER_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}\Z")
# The types that PEFT gives to settings whose values are not used, or must be empty. null is always allowed: PEFT writes
# it for whatever was not set. A setting that is used is checked where it is read.
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


class ConfigFields:
    """One config's values by type; what is wrong goes into `reasons`, and a harmless stand-in is returned."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table
        self.reasons: list[str] = []

    def require_known(self, known: Set[str]) -> None:
        """Refuse every other key, unless it says nothing."""
        for key in self.unknown(known):
            value = self.table[key]
            self.require(is_empty(value), f"unknown setting {key[:100]!r} = {show(value)} may change the result")

    def unknown(self, known: Set[str]) -> list[str]:
        return [key for key in self.table if key not in known]

    def finish(self) -> None:
        """Raises InvalidAdapterError with every reason found."""
        if self.reasons:
            raise InvalidAdapterError(sorted(self.reasons))

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            self.reasons.append(reason)

    def rank(self, key: str) -> int:
        return self._rank(key, self.table.get(key))

    def number(self, key: str) -> float:
        return self._number(key, self.table.get(key))

    def integer(self, key: str) -> int:
        value = self.table.get(key)
        self.require(type(value) is int, f"{key} must be an integer (got {show(value)})")
        return value if type(value) is int else 0

    def rank_rules(self, alpha_key: str) -> RankRules:
        return RankRules(
            self.rank("r"),
            self.number(alpha_key),
            self._pattern("rank_pattern", self._rank),
            self._pattern("alpha_pattern", self._number),
            self.flag("use_rslora"),
        )

    def _pattern(self, key: str, read: Callable[[str, Any], T]) -> tuple[tuple[str, T], ...]:
        return tuple((name, read(f"{key}[{name[:100]!r}]", value)) for name, value in self.mapping(key))

    def _rank(self, key: str, value: Any) -> int:
        if type(value) is int and 1 <= value < 2**31:
            return value
        self.reasons.append(f"{key} must be a positive integer (got {show(value)})")
        return 1

    def _number(self, key: str, value: Any) -> float:
        if type(value) in (int, float) and abs(value) <= 1e6:
            return float(value)
        self.reasons.append(f"{key} must be a number from -1e6 to 1e6 (got {show(value)})")
        return 1.0

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.table.get(key)
        self.require(value is None or isinstance(value, bool), f"{key} must be true or false (got {show(value)})")
        return default if value is None else value is True

    def text(self, key: str) -> str:
        value = self.table.get(key)
        return value[:1000] if isinstance(value, str) else ""

    def mapping(self, key: str) -> list[tuple[str, Any]]:
        value = {} if self.table.get(key) is None else self.table[key]
        if isinstance(value, dict) and len(value) <= MAX_PATTERNS:
            return list(value.items())
        self.reasons.append(f"{key} must be a table of at most {MAX_PATTERNS} entries")
        return []

    def modules(self, key: str, required: bool) -> tuple[str, ...] | str:
        value = self.table.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and value and len(value) <= MAX_PATTERNS and _are_strings(value):
            return tuple(value)
        self.require(
            not required and value in (None, "", []), f"{key} must list names or be a regex (got {show(value)})"
        )
        return ()

    def layers(self) -> tuple[int, ...] | None:
        value = self.table.get("layers_to_transform")
        layers = [value] if type(value) is int else value
        if layers is None or layers == []:  # PEFT takes an empty list for "every layer"
            return None
        if not _is_list(layers, MAX_PATTERNS) or not all(type(layer) is int for layer in layers):
            self.reasons.append(
                f"layers_to_transform must be a list of at most {MAX_PATTERNS} integers (got {show(value)})"
            )
            return None
        self._require_list_targets("layers_to_transform")
        return tuple(layers)

    def layers_pattern(self) -> tuple[str, ...]:
        value = self.table.get("layers_pattern")
        names = [value] if isinstance(value, str) else value
        if value in (None, "", []):
            return ()
        if not _is_list(names, MAX_LAYER_NAMES) or not _are_strings(names) or not all(map(_LAYER_NAME.match, names)):
            self.reasons.append(
                f"layers_pattern must be at most {MAX_LAYER_NAMES} plain names such as 'layers' (got {show(value)})"
            )
            return ()
        self.require(self.table.get("layers_to_transform") is not None, "layers_pattern needs layers_to_transform")
        self._require_list_targets("layers_pattern")
        return tuple(names)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; none for null."""
        value = self.table.get(key)
        if isinstance(value, list) and len(value) <= MAX_PATTERNS and _are_strings(value):
            return tuple(value)
        self.require(value in (None, []), f"{key} must list names (got {show(value)})")
        return ()

    def token_ids(self, key: str, value: Any) -> tuple[int, ...]:
        """A list of token ids."""
        if isinstance(value, list) and value and all(type(item) is int and 0 <= item < 2**31 for item in value):
            return tuple(value)
        self.reasons.append(f"{key} must list token ids (got {show(value)})")
        return ()

    def _require_list_targets(self, key: str) -> None:
        self.require(
            not isinstance(self.table.get("target_modules"), str), f"{key} cannot go with a target_modules regex"
        )


def _is_list(value: object, max_length: int) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and len(value) <= max_length


def _are_strings(values: list[Any]) -> bool:
    return all(isinstance(value, str) and 0 < len(value) <= MAX_PATTERNS for value in values)


def is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (type(value) in (int, float) and value == 0)


def show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def wrong_kinds(table: Mapping[str, Any]) -> Iterator[str]:
    """Settings of another type than PEFT's own, in words."""
    for name, kinds in KINDS.items():
        value = table.get(name)
        if value is not None and type(value) not in kinds:
            words = " or ".join(_WORDS[kind] for kind in kinds if kinds != _NUMBER or kind is float)
            yield f"{name} must be {words} (got {show(value)})"


def words(text: str) -> frozenset[str]:
    """A set of names, written with blanks between them."""
    return frozenset(text.split())


# Keys that every method has: which modules are meant and what else was saved. `peft_config` reads them.
SHARED = words(
    "auto_mapping base_model_name_or_path bias exclude_modules inference_mode layers_pattern "
    "layers_to_transform modules_to_save peft_type peft_version revision runtime_config target_modules "
    "task_type"
)


class MethodFields(ConfigFields):
    """The values of a method's own keys; any key that is neither its own nor shared is refused."""

    def __init__(self, table: Mapping[str, Any], peft_type: str, known: Set[str]) -> None:
        super().__init__(table)
        found = table.get("peft_type")
        self.require(found == peft_type, f"peft_type is {show(found)}, not {peft_type}")
        self.require_known(known | SHARED)

    def names_or_regex(self, key: str) -> tuple[str, ...] | str:
        """A list of names, perhaps empty, or one regex."""
        value = self.table.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and len(value) <= MAX_PATTERNS and all(isinstance(name, str) for name in value):
            return tuple(value)
        self.reasons.append(f"{key} must list names or be a regex (got {show(value)})")
        return ()


# The rank and alpha settings that LoHa and LoKr share (peft/tuners/lycoris_utils.py), which are LoRA's by meaning.
PATTERN_KEYS = words("alpha alpha_pattern r rank_pattern")
RankTable: TypeAlias = Mapping[str, tuple[int, float]]  # module -> (rank, alpha / rank)


def read(settings: MethodFields) -> RankRules:
    """The rules, with `alpha` in place of `lora_alpha`. Raises InvalidAdapterError with every reason found."""
    rules = settings.rank_rules("alpha")
    settings.finish()
    return rules


def plan(config: RankRules, targets: Mapping[str, LinearShape]) -> RankTable:
    """Match the patterns once for all modules. Raises InvalidAdapterError (see checkpoint/module_patterns.py)."""
    return ranks_and_scales(config, tuple(targets))
