"""Which modules a config means: PEFT's own rules, tested against PEFT.

Rules: peft/tuners/tuners_utils.py `check_target_module_exists`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from lora_serve.adapters.checkpoint.module_patterns import Pattern, match_names, tails
from lora_serve.adapters.checkpoint.peft_config import PeftConfig

ALL_LINEAR = "all-linear"
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")  # lazy: the layer's number, not an expert's inside it


def targeted(config: PeftConfig, modules: Sequence[str]) -> frozenset[str]:
    """The layers among `modules` that `config` adapts."""
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
