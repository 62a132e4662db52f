"""Names are looked up, not compared one by one: the verdicts are those of PEFT's own comparisons."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.adapters.checkpoint.module_patterns import RankRules
from lora_serve.adapters.checkpoint.peft_config import PeftConfig, saved_whole, targeted, targeted_parameters

PATHS = st.lists(st.text(alphabet="ab_.", min_size=1, max_size=8), min_size=1, max_size=6).map(tuple)
NAMES = st.lists(st.text(alphabet="ab_.", min_size=1, max_size=4), max_size=5).map(tuple)


def config(**changes: tuple[str, ...]) -> PeftConfig:
    empty = {"target_modules": (), "exclude_modules": (), "layers_pattern": ()}
    return PeftConfig(ranks=RankRules(2, 4.0), layers_to_transform=None, base_model="", ignored=(), **empty | changes)


def is_named(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith("." + name) for name in names)


@given(PATHS, NAMES, NAMES, NAMES)
def test_targets(
    paths: tuple[str, ...], named: tuple[str, ...], excluded: tuple[str, ...], saved: tuple[str, ...]
) -> None:
    found = targeted(config(target_modules=named, exclude_modules=excluded, modules_to_save=saved), paths)
    assert found == {
        path
        for path in paths
        if is_named(path, named)
        and not is_named(path, excluded)
        and not any(f".{name}." in f".{path}." for name in saved)
    }


@given(PATHS, NAMES)
def test_target_parameters(paths: tuple[str, ...], named: tuple[str, ...]) -> None:
    found = targeted_parameters(config(target_parameters=named), paths)
    assert found == {path for path in paths if is_named(path, named)}


@given(PATHS, NAMES)
def test_modules_to_save(paths: tuple[str, ...], names: tuple[str, ...]) -> None:
    found = saved_whole(config(modules_to_save=names), paths)
    assert found == {p for p in paths if any(p[: m.end()].endswith(names) for m in re.finditer(r"[^.]+", p))}
