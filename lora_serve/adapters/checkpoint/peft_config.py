"""Own parser of PEFT's adapter_config.json, by allow-list: what would change the maths is understood or refused.

PEFT's code never sees an untrusted config: it imports modules named there, rewrites base weights for some
initialisations, and falls back to a download (see peft/config.py and peft/tuners/lora/config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint.content import CONFIG_NAME, MAX_CONFIG_BYTES
from lora_serve.adapters.checkpoint.methods import GAIN_METHODS, METHODS, Method
from lora_serve.adapters.checkpoint.module_patterns import Pattern, RankRules, match_names, tails
from lora_serve.adapters.checkpoint.peft_fields import SHARED, ConfigFields, is_empty, show, words, wrong_kinds
from lora_serve.adapters.regular_file import open_regular, pieces_of, size_of
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.strict_json import parse_object

MAX_DEPTH = 8
MAX_INVOCATION = 4096  # tokens; they are kept in the catalog and looked for in every prompt

# Never change what a trained LoRA computes; of fan_in_fan_out the layer itself says how its weight lies.
_LORA_HARMLESS = words(
    "corda_config eva_config fan_in_fan_out loftq_config lora_dropout lora_ga_config megatron_core monteclora_config "
    "qalora_group_size velora_config"
)
_LORA_UNDERSTOOD = words(
    "alora_invocation_tokens alpha_pattern ensure_weight_tying init_lora_weights lora_alpha lora_bias r "
    "rank_pattern target_parameters trainable_token_indices use_dora use_rslora"
)
_UNSUPPORTED = {
    "layer_replication": "layer replication",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "megatron_config": "Megatron layers",
}
_KNOWN = SHARED | _LORA_HARMLESS | _LORA_UNDERSTOOD | _UNSUPPORTED.keys()
OTHER_METHODS: Mapping[str, Method] = {**METHODS, **GAIN_METHODS}
_INIT_ONLY = ("gaussian", "eva", "orthogonal", "mica")  # start values of A and B; the base weights stay as they are
_INIT_UNDONE = ("pissa", "olora")  # change the base's weights, but in a way that can be worked out again from them
INIT_RANKS = 2  # times the rank is needed for an adapter of such a start: its own and its start's
GENERATION_TASKS = ("CAUSAL_LM",)
POOLING_TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS")  # an adapter of a language model may embed as well
_BIASES = ("none", "all", "lora_only")
ALL_LINEAR = "all-linear"
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")  # lazy: the layer's number, not an expert's inside it


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """A PEFT config, as far as it concerns the maths."""

    ranks: RankRules
    target_modules: tuple[str, ...] | str  # names or suffixes; a str is a regex or "all-linear"
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    base_model: str  # as the trainer wrote it; text for people
    ignored: tuple[str, ...]  # unknown keys whose value is null, false or empty
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"  # whose trained biases are saved: "none", "all", or those of the layers it targets ("lora_only")
    modules_to_save: tuple[str, ...] = ()  # ends of module paths, trained in full
    target_parameters: tuple[str, ...] = ()  # ends of parameter paths
    trained_tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()  # end of an embedding's path ("": the input's) -> ids
    invocation_tokens: tuple[int, ...] = ()  # activated LoRA: the weights act from these on
    ensure_weight_tying: bool = False
    init: str = ""  # "pissa" or "olora": relative to a base whose weights that start has changed (weights.py)
    peft_type: str = "LORA"
    method: Any = None  # what a method other than LoRA read of the settings of its own


def read_config(path: Path, max_rank: int | None = None, tasks: tuple[str, ...] = GENERATION_TASKS) -> PeftConfig:
    """Read and check the file. Raises InvalidAdapterError with every reason found, OSError."""
    with open_regular(path) as file:
        if size_of(file) > MAX_CONFIG_BYTES:
            raise InvalidAdapterError([f"{path.name} is larger than {MAX_CONFIG_BYTES} bytes"])
        return parse_config(b"".join(pieces_of(file)), max_rank, tasks)


def parse_config(text: bytes, max_rank: int | None = None, tasks: tuple[str, ...] = GENERATION_TASKS) -> PeftConfig:
    """Reads and checks the file's bytes. `max_rank`: the largest rank of any module (None: no limit).

    `tasks`: what it may have been trained for.
    """
    fields = ConfigFields(parse_object(text.removeprefix(b"\xef\xbb\xbf"), CONFIG_NAME, MAX_DEPTH))
    fields.reasons += wrong_kinds(fields.table)
    peft_type = str(fields.table.get("peft_type"))
    if peft_type not in ("LORA", *OTHER_METHODS):  # whose settings are its own
        known = ", ".join(["LORA", *sorted(OTHER_METHODS)])
        raise InvalidAdapterError([f"peft_type {show(fields.table.get('peft_type'))} is not one of {known}"])
    config = _method_config(fields, peft_type) if peft_type in OTHER_METHODS else _lora_config(fields)
    _check_rank(fields, config, max_rank)
    _check_task(fields, tasks)
    if fields.reasons:
        raise InvalidAdapterError(list(dict.fromkeys(fields.reasons)))
    return config


def targeted(config: PeftConfig, modules: Sequence[str]) -> frozenset[str]:
    """The layers among `modules` that `config` adapts, by PEFT's own rules.

    Source: peft/tuners/tuners_utils.py `check_target_module_exists`.
    """
    excluded = _excluded(config, modules)
    saved = frozenset(config.modules_to_save)
    candidates = [module for module in modules if module not in excluded and saved.isdisjoint(_runs(module))]
    if isinstance(config.target_modules, str):
        if config.target_modules.lower() == ALL_LINEAR:
            return frozenset(module for module in candidates if _FIRST_INDEX.match(module + "."))
        return match_names([Pattern(config.target_modules, whole=True)], candidates)[0]
    return frozenset(module for module in _named(candidates, config.target_modules) if _layer_counts(config, module))


def targeted_parameters(config: PeftConfig, parameters: Iterable[str]) -> frozenset[str]:
    """The parameters, by whole path, that `target_parameters` names."""
    return _named(parameters, config.target_parameters)


def saved_whole(config: PeftConfig, modules: Iterable[str]) -> frozenset[str]:
    """The modules that `modules_to_save` names by an end of their paths, and those inside of them."""
    names = frozenset(config.modules_to_save)
    lengths = frozenset(map(len, names))
    return frozenset(module for module in modules if _ends(module, names, lengths))


def _check_rank(fields: ConfigFields, config: PeftConfig, max_rank: int | None) -> None:
    rank, largest = config.ranks.largest, config.ranks.largest * (INIT_RANKS if config.init else 1)
    if max_rank is not None and largest > max_rank:
        how = f" (saved as {rank}; without its {config.init} initialisation it is twice that)" if config.init else ""
        fields.reasons.append(f"rank {largest} is larger than --max-lora-rank {max_rank}{how}")


def _check_task(fields: ConfigFields, tasks: tuple[str, ...]) -> None:
    task = fields.table.get("task_type")
    known = tasks[0] if len(tasks) == 1 else f"one of {', '.join(tasks)}"
    fields.require(task is None or task in tasks, f"task_type {show(task)} is not {known}")


def _check_lora(fields: ConfigFields) -> None:
    for key, what in _UNSUPPORTED.items():
        value = fields.table.get(key)
        fields.require(is_empty(value), f"{key}: {what} is not supported (got {show(value)})")
    fields.require_known(_KNOWN)


def _init(fields: ConfigFields) -> str:
    """The initialisation that changed the base's weights, if it can be undone; else empty."""
    value = fields.table.get("init_lora_weights", True)
    if isinstance(value, bool) or value is None or value in _INIT_ONLY:
        return ""
    name = value.lower() if isinstance(value, str) and value.lower() == "olora" else value  # as PEFT reads it
    if name in _INIT_UNDONE:
        return str(name)
    is_random = isinstance(value, str) and value.startswith("pissa_niter_")
    how = " by a random decomposition, which nobody can repeat" if is_random else ""
    fields.reasons.append(
        f"init_lora_weights {show(value)} changes the base model's weights{how}: convert the adapter with "
        "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
    )
    return ""


def _check_undone(fields: ConfigFields, config: PeftConfig) -> None:
    """Refuses settings that such an initialisation cannot go with: before the invocation the base would be the changed
    one; experts are a stack of matrices; PEFT itself takes no lora_bias with it.
    """
    for key in ("alora_invocation_tokens", "target_parameters", "lora_bias") if config.init else ():
        value = fields.table.get(key)
        fields.require(is_empty(value), f"init_lora_weights {show(config.init)} cannot go with {key}")


def _shared_config(fields: ConfigFields, ranks: RankRules, known: Set[str], needs_modules: bool = True) -> PeftConfig:
    """The settings that LoRA and all other methods have. `known`: all settings that the method has."""
    return PeftConfig(
        ranks=ranks,
        target_modules=fields.modules("target_modules", required=needs_modules),
        exclude_modules=fields.modules("exclude_modules", required=False),
        layers_to_transform=fields.layers(),
        layers_pattern=fields.layers_pattern(),
        base_model=fields.text("base_model_name_or_path"),
        ignored=tuple(sorted(fields.unknown(known))),
    )


def _method_config(fields: ConfigFields, peft_type: str) -> PeftConfig:
    """The config of a method other than LoRA: its target modules, and its own settings."""
    bias = fields.table.get("bias")
    fields.require(bias in (None, "none"), f"bias {show(bias)} is not supported with {peft_type}, only none")
    method, own = OTHER_METHODS[peft_type], None
    try:
        own = method.parse(fields.table)
    except InvalidAdapterError as error:
        fields.reasons += error.reasons
    ranks = RankRules(1, 1.0)  # not LoRA's: its modules' ranks follow from their tensors
    config = _shared_config(fields, ranks, SHARED | method.HARMLESS | method.UNDERSTOOD)
    return replace(config, modules_to_save=fields.names("modules_to_save"), peft_type=peft_type, method=own)


def _lora_config(fields: ConfigFields) -> PeftConfig:
    table = fields.table
    _check_lora(fields)
    parameters = fields.names("target_parameters")
    bias = "none" if table.get("bias") is None else table["bias"]
    fields.require(bias in _BIASES, f"bias must be one of {', '.join(_BIASES)} (got {show(bias)})")
    config = replace(
        _shared_config(fields, fields.rank_rules("lora_alpha"), _KNOWN, needs_modules=not parameters),
        use_dora=fields.flag("use_dora"),
        lora_bias=fields.flag("lora_bias"),
        bias=str(bias),
        modules_to_save=fields.names("modules_to_save"),
        target_parameters=parameters,
        trained_tokens=_trained_tokens(fields),
        invocation_tokens=_invocation_tokens(fields),
        ensure_weight_tying=fields.flag("ensure_weight_tying"),
        init=_init(fields),
    )
    _check_undone(fields, config)
    fields.require(
        not (config.use_dora and config.lora_bias), "use_dora cannot go with lora_bias: PEFT does not define it"
    )
    for key in ("use_dora", "lora_bias"):
        is_defined = not (getattr(config, key) and config.target_parameters)
        fields.require(is_defined, f"{key} cannot go with target_parameters: PEFT does not define it")
    return config


def _trained_tokens(fields: ConfigFields) -> tuple[tuple[str, tuple[int, ...]], ...]:
    value = fields.table.get("trainable_token_indices")
    if value in (None, [], {}):
        return ()
    table = value if isinstance(value, dict) else {"": value}
    return tuple((name, fields.token_ids("trainable_token_indices", ids)) for name, ids in table.items())


def _invocation_tokens(fields: ConfigFields) -> tuple[int, ...]:
    """Activated LoRA (Greenewald et al., 2025, arXiv 2504.12397)."""
    value = fields.table.get("alora_invocation_tokens")
    if isinstance(value, list) and len(value) > MAX_INVOCATION:
        fields.reasons.append(f"alora_invocation_tokens lists {len(value)} tokens; {MAX_INVOCATION} are allowed")
        return ()
    return () if value in (None, []) else fields.token_ids("alora_invocation_tokens", value)


def _excluded(config: PeftConfig, modules: Sequence[str]) -> frozenset[str]:
    exclude = config.exclude_modules
    if isinstance(exclude, str):
        return match_names([Pattern(exclude, whole=True)], modules)[0]
    return _named(modules, exclude)


def _runs(module: str) -> Iterator[str]:
    """PEFT gives no low-rank delta to what it trains in full: a run of whole path segments names it."""
    segments = module.split(".")
    for begin in range(len(segments)):
        for end in range(begin, len(segments)):
            yield ".".join(segments[begin : end + 1])


def _ends(module: str, names: frozenset[str], lengths: frozenset[int]) -> bool:
    """PEFT's own test for modules_to_save: the path or that of a parent ends with a name, a dot before it or not.

    `lengths`: of the names.
    """
    parents = [module[: match.end()] for match in re.finditer(r"[^.]+", module)]
    return any(parent[-length:] in names for parent in parents for length in lengths if length <= len(parent))


def _named(modules: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """Those that are a name, or end with one after a dot; looked up, as there may be thousands of both."""
    known = frozenset(names)
    return frozenset(module for module in modules if not known.isdisjoint(tails(module)))


def _layer_counts(config: PeftConfig, module: str) -> bool:
    if config.layers_to_transform is None:
        return True
    patterns = [re.compile(rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.") for name in config.layers_pattern] or [_FIRST_INDEX]
    match = next(filter(None, (pattern.match(module) for pattern in patterns)), None)
    return match is not None and int(match["idx"]) in config.layers_to_transform
