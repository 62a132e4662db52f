"""Attention of bfloat16: the same bits by every build whose products have one order of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from lora_serve.model.native import compiler, library
from tests.model.native.test_bfloat16_products import BUILDS
from tests.model.native.test_paged_attention import CASES, LENGTH, Case


def steep(case: Case) -> None:
    """Scores so far apart that weights and factors come near the smallest numbers."""
    case.query *= 40


def tiny(case: Case) -> None:
    """Values whose sums are denormal."""
    case.values *= 2.0**-125
    case.write()


def as_it_is(_: Case) -> None:
    pass


KINDS: Mapping[str, Callable[[Case], None]] = {"ordinary": as_it_is, "steep": steep, "tiny": tiny}
NAMES = [name for name in CASES if name.startswith("bfloat16")]


def found_by(build: tuple[str, tuple[str, ...]], folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """The results of all cases by the kernels of a level, with something defined."""
    level, defined = build
    flags = compiler.flags(compiler.LEVELS[level], "bfloat16")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "flags", lambda *_: (*flags, *defined))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        library.forget()
        try:
            for name in NAMES:
                for kind, change in KINDS.items():
                    case = Case(**CASES[name])
                    change(case)
                    found[name, kind] = case.run((99, 100), (0, LENGTH))
        finally:
            library.forget()
    return found


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.nightly  # six builds of all kernels, 3 s each; by day: tests/model/fusion/test_levels.py
@pytest.mark.parametrize("order", ["dot", "blocks"])
def test_bits_are_the_same_by_every_build(order: str, builds: Path) -> None:
    of_order = [build for name, build in BUILDS.items() if name.startswith(order)]
    first, *others = [found_by(build, builds) for build in of_order]
    assert len(others) >= (1 if len(BUILDS) > 2 else 0)
    for found in others:
        assert [key for key in first if not same_bits(found[key], first[key])] == []
