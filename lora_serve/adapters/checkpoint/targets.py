"""Which modules a config means: PEFT's own rules, tested against PEFT.

Rules: peft/tuners/tuners_utils.py `check_target_module_exists`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lora_serve.adapters.checkpoint.patterns import Pattern, match_names
from lora_serve.adapters.checkpoint.peft_config import PeftConfig

ALL_LINEAR = "all-linear"
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")  # lazy: the layer's number, not an expert's inside it


def targeted(config: PeftConfig, modules: Sequence[str]) -> frozenset[str]:
    """The layers among `modules` that `config` adapts."""
    excluded = _excluded(config, modules)
    candidates = [module for module in modules if module not in excluded and not _is_saved_whole(config, module)]
    if isinstance(config.target_modules, str):
        if config.target_modules.lower() == ALL_LINEAR:
            return frozenset(module for module in candidates if _FIRST_INDEX.match(module + "."))
        return match_names([Pattern(config.target_modules, whole=True)], candidates)[0]
    named = [module for module in candidates if _is_named(module, config.target_modules)]
    return frozenset(module for module in named if _layer_counts(config, module))


def targeted_parameters(config: PeftConfig, parameters: Iterable[str]) -> frozenset[str]:
    """The parameters, by whole path, that `target_parameters` names."""
    return frozenset(path for path in parameters if _is_named(path, config.target_parameters))


def saved_whole(config: PeftConfig, modules: Iterable[str]) -> frozenset[str]:
    """The modules that `modules_to_save` names by an end of their paths, and those inside of them."""
    return frozenset(module for module in modules if _ends(module, config.modules_to_save))


def _excluded(config: PeftConfig, modules: Sequence[str]) -> frozenset[str]:
    exclude = config.exclude_modules
    if isinstance(exclude, str):
        return match_names([Pattern(exclude, whole=True)], modules)[0]
    return frozenset(module for module in modules if _is_named(module, exclude))


def _is_saved_whole(config: PeftConfig, module: str) -> bool:
    """PEFT gives no low-rank delta to what it trains in full: a run of whole path segments names it."""
    return any(f".{name}." in f".{module}." for name in config.modules_to_save)


def _ends(module: str, names: tuple[str, ...]) -> bool:
    """PEFT's own test for modules_to_save: the path or that of a parent ends with a name, a dot before it or not."""
    return any(module[: match.end()].endswith(names) for match in re.finditer(r"[^.]+", module))


def _is_named(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.endswith("." + name) for name in names)


def _layer_counts(config: PeftConfig, module: str) -> bool:
    if config.layers_to_transform is None:
        return True
    patterns = [re.compile(rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.") for name in config.layers_pattern] or [_FIRST_INDEX]
    match = next(filter(None, (pattern.match(module) for pattern in patterns)), None)
    return match is not None and int(match["idx"]) in config.layers_to_transform
