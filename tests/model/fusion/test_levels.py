"""The bfloat16 path without the instructions of the processor at hand: portable C gives the same bits, and a row is as
alone there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_serve.model.native import compiler, library
from tests.model.fusion.test_fuse import FUSED, fused_kinds
from tests.model.fusion.test_row_alone import (
    NAMES,
    SHAPE,
    assert_rows_are_alone,
    engine_of,
    numbers,
    requests,
    save_adapters,
)
from tests.model.native.conftest import QUICK, flags_of
from tests.oracle import save_tiny_model
from tests.tiers import by_tier, mostly_nightly

OWN_ORDER = compiler.serving(compiler.current(), "bfloat16").bfloat16_order  # the other one by night
_LOWEST = compiler.available()[:2][-1].flags  # with fused multiply-adds, AVX2's on x86
# By the order of the sums of bfloat16 products: those of an AVX2 processor, in vectors of its own and in longer ones.
PORTABLE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "dot": ((*_LOWEST, "-DLANES=8"), (*_LOWEST, "-DLANES=16")),
    "blocks": (
        (*_LOWEST, "-DLANES=8", "-DBFLOAT16_ORDER_BLOCKS"),
        (*_LOWEST, "-DLANES=16", "-DBFLOAT16_ORDER_BLOCKS"),
    ),
}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("levels")
    model = save_tiny_model("qwen3", root / "model", **SHAPE)
    return model, save_adapters(model, root)


@contextmanager
def kernels(folder: Path, flags: tuple[str, ...]) -> Iterator[None]:
    """Kernels of a build of one's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "flags", flags_of((*QUICK, "-fopenmp", *flags)))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        library.forget()
        try:
            yield
        finally:
            library.forget()


def rows_of_bfloat16(folders: tuple[Path, dict[str, Path]]) -> list[object]:
    """The numbers of rows without adapters or with those of bfloat16, beside rows with one of float32."""
    engine = engine_of(folders, 64, "bfloat16")
    assert fused_kinds(engine) == FUSED["qwen3"]
    answers = engine.run(requests(engine))
    return [numbers(answer) for i, answer in enumerate(answers) if NAMES[i % len(NAMES)] != "a"]


@pytest.mark.search
@pytest.mark.parametrize("order", mostly_nightly(PORTABLE, OWN_ORDER))
def test_portable_kernels_give_the_bits_of_the_processors_own_instructions(
    order: str, folders: tuple[Path, dict[str, Path]], builds: Path
) -> None:
    own = [level.flags for level in compiler.available() if level.multiplies_bfloat16 and level.bfloat16_order == order]
    portable = by_tier(PORTABLE[order][: None if not own else 1], PORTABLE[order])
    found = {}
    for flags in (*portable, *own):
        with kernels(builds, flags):
            found[" ".join(flags)] = rows_of_bfloat16(folders)
    first, *others = found.values()
    assert len(others) >= 1
    assert [name for name, bits in found.items() if bits != first] == []


@pytest.mark.parametrize("order", mostly_nightly(PORTABLE, OWN_ORDER))
def test_row_is_alone_in_portable_kernels_too(order: str, folders: tuple[Path, dict[str, Path]], builds: Path) -> None:
    with kernels(builds, PORTABLE[order][0]):
        assert_rows_are_alone(folders, "bfloat16", (512, 23))


def test_orders_differ_in_their_bits(folders: tuple[Path, dict[str, Path]], builds: Path) -> None:
    """Else the tests above compare nothing."""
    found = []
    for order in PORTABLE.values():
        with kernels(builds, order[0]):
            found.append(rows_of_bfloat16(folders))
    assert found[0] != found[1]
