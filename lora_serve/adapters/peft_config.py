"""Own parser of PEFT's adapter_config.json, by allow-list: what would change the maths is understood or refused.

PEFT's code never sees an untrusted config: it imports modules named there, rewrites base weights for some
initialisations, and falls back to a download (see peft/config.py and peft/tuners/lora/config.py).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_serve.adapters.strict_json import parse_object
from lora_serve.core.errors import InvalidAdapterError

MAX_FILE_BYTES = 2**20
MAX_DEPTH = 8
MAX_PATTERNS = 4096

# Never change what a trained LoRA computes.
_HARMLESS = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    ]
)
_UNDERSTOOD = frozenset(
    [
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    ]
)
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained modules",
    "trainable_token_indices": "trained token embeddings",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on bare parameters",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "lora_bias": "a bias in lora_B",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "Megatron layers",
    "ensure_weight_tying": "tied adapters",
}
_INIT_ONLY = ("gaussian", "eva", "orthogonal")  # start values of A and B only; the base weights stay as they are
_LAYER_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}\Z")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What a PEFT LoRA config says about the maths. Patterns keep their order: the first that matches counts."""

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: tuple[str, ...] | str  # names or suffixes; a str is a regex or "all-linear"
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    base_model: str  # as the trainer wrote it; text for people
    ignored: tuple[str, ...]  # unknown keys whose value is null, false or empty

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA (https://arxiv.org/abs/2312.03732)."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_config(path: Path, max_rank: int | None = None) -> LoraConfig:
    """Read and check the file. Raises InvalidAdapterError with every reason found, OSError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidAdapterError([f"{path.name} is larger than {MAX_FILE_BYTES} bytes"])
    return parse_config(path.read_bytes(), max_rank)


def parse_config(text: bytes, max_rank: int | None = None) -> LoraConfig:
    """The same from the file's bytes. `max_rank`: the largest rank of any module (None: no limit)."""
    table = _parse_json(text)
    fields = _Fields(table)
    fields.check_supported()
    config = fields.config()
    fields.check_ranks(config, max_rank)
    if fields.reasons:
        raise InvalidAdapterError(fields.reasons)
    return config


def _parse_json(text: bytes) -> dict[str, Any]:
    table = parse_object(text.removeprefix(b"\xef\xbb\xbf"), "adapter_config.json")
    if _depth(table) > MAX_DEPTH:
        raise InvalidAdapterError([f"adapter_config.json is nested more than {MAX_DEPTH} deep"])
    return table


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for children in inner for child in children]
    return depth


class _Fields:
    """Takes values out of the parsed JSON and collects what is wrong with them."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.reasons: list[str] = []

    def check_supported(self) -> None:
        table = self.table
        self._require(table.get("peft_type") == "LORA", f"peft_type is {_show(table.get('peft_type'))}, not LORA")
        task = table.get("task_type")
        self._require(task in (None, "CAUSAL_LM"), f"task_type {_show(task)} is not CAUSAL_LM")
        bias = table.get("bias", "none")
        self._require(bias in (None, "none"), f"bias {_show(bias)} is not supported yet, only none")
        for key, what in _UNSUPPORTED.items():
            value = table.get(key)
            self._require(_is_empty(value), f"{key}: {what} is not supported yet (got {_show(value)})")
        for key in self._unknown():
            self._require(
                _is_empty(table[key]), f"unknown setting {key[:100]!r} = {_show(table[key])} may change the result"
            )
        self._check_init(table.get("init_lora_weights", True))

    def config(self) -> LoraConfig:
        ranks = ((key, self._rank(f"rank_pattern[{key[:100]!r}]", n)) for key, n in self._map("rank_pattern"))
        alphas = ((key, self._number(f"alpha_pattern[{key[:100]!r}]", n)) for key, n in self._map("alpha_pattern"))
        return LoraConfig(
            r=self._rank("r", self.table.get("r")),
            alpha=self._number("lora_alpha", self.table.get("lora_alpha")),
            use_rslora=self._flag("use_rslora"),
            rank_pattern=tuple(ranks),
            alpha_pattern=tuple(alphas),
            target_modules=self._modules("target_modules", required=True),
            exclude_modules=self._modules("exclude_modules", required=False),
            layers_to_transform=self._layers(),
            layers_pattern=self._layers_pattern(),
            base_model=self._text("base_model_name_or_path"),
            ignored=tuple(sorted(self._unknown())),
        )

    def check_ranks(self, config: LoraConfig, max_rank: int | None) -> None:
        largest = max([config.r, *(rank for _, rank in config.rank_pattern)])
        if max_rank is not None and largest > max_rank:
            self.reasons.append(f"rank {largest} is larger than --max-lora-rank {max_rank}")

    def _unknown(self) -> list[str]:
        return [key for key in self.table if key not in _HARMLESS | _UNDERSTOOD | _UNSUPPORTED.keys()]

    def _require(self, condition: bool, reason: str) -> None:
        if not condition:
            self.reasons.append(reason)

    def _check_init(self, value: Any) -> None:
        if not (isinstance(value, bool) or value is None or value in _INIT_ONLY):
            self.reasons.append(
                f"init_lora_weights {_show(value)} changes the base model's weights: convert the adapter with "
                "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
            )

    def _rank(self, key: str, value: Any) -> int:
        if type(value) is int and 1 <= value < 2**31:
            return value
        self.reasons.append(f"{key} must be a positive integer (got {_show(value)})")
        return 1

    def _number(self, key: str, value: Any) -> float:
        if type(value) in (int, float) and abs(value) < 1e6:
            return float(value)
        self.reasons.append(f"{key} must be a finite number (got {_show(value)})")
        return 1.0

    def _flag(self, key: str) -> bool:
        value = self.table.get(key)
        self._require(value is None or isinstance(value, bool), f"{key} must be true or false (got {_show(value)})")
        return value is True

    def _text(self, key: str) -> str:
        value = self.table.get(key)
        return value[:1000] if isinstance(value, str) else ""

    def _map(self, key: str) -> list[tuple[str, Any]]:
        value = self.table.get(key) or {}
        if isinstance(value, dict) and len(value) <= MAX_PATTERNS:
            return list(value.items())
        self.reasons.append(f"{key} must map at most {MAX_PATTERNS} patterns to numbers")
        return []

    def _modules(self, key: str, required: bool) -> tuple[str, ...] | str:
        value = self.table.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and value and len(value) <= MAX_PATTERNS and _are_strings(value):
            return tuple(value)
        self._require(not required and _is_empty(value), f"{key} must list names or be a regex (got {_show(value)})")
        return ()

    def _layers(self) -> tuple[int, ...] | None:
        value = self.table.get("layers_to_transform")
        layers = [value] if type(value) is int else value
        if layers is None or layers == []:  # PEFT takes an empty list for "every layer"
            return None
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            self.reasons.append(f"layers_to_transform must be a list of integers (got {_show(value)})")
            return None
        self._require_list_targets("layers_to_transform")
        return tuple(layers)

    def _layers_pattern(self) -> tuple[str, ...]:
        value = self.table.get("layers_pattern")
        names = [value] if isinstance(value, str) else value
        if _is_empty(value):
            return ()
        if not isinstance(names, list) or not _are_strings(names) or not all(map(_LAYER_NAME.match, names)):
            self.reasons.append(f"layers_pattern must be plain names such as 'layers' (got {_show(value)})")
            return ()
        self._require(self.table.get("layers_to_transform") is not None, "layers_pattern needs layers_to_transform")
        self._require_list_targets("layers_pattern")
        return tuple(names)

    def _require_list_targets(self, key: str) -> None:
        self._require(
            not isinstance(self.table.get("target_modules"), str), f"{key} cannot go with a target_modules regex"
        )


def _are_strings(values: list[Any]) -> bool:
    return all(isinstance(value, str) and 0 < len(value) <= MAX_PATTERNS for value in values)


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (type(value) in (int, float) and value == 0)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
