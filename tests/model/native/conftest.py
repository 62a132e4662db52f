"""Three builds of the same sources, for the tests of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_serve.model.native import compiler, library
from lora_serve.model.native.compiler import Level

QUICK = ("-O1", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "--param=avoid-fma-max-bits=0", "-Wno-psabi")
BUILDS = {
    "as served": None,
    "16 lanes": (
        *QUICK,
        "-fopenmp",
        "-march=native",
        "-DLANES=16",
    ),  # elsewhere than on AVX-512 they are cut
    "plain CPU, one thread": (*QUICK, "-DLANES=8"),  # SSE only on x86: no fused multiply-add, no OpenMP
}


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest, builds: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if (flags := BUILDS[request.param]) is not None:
            patch.setattr(compiler, "flags", flags_of(flags))
            patch.setenv("XDG_CACHE_HOME", str(builds))
        library.forget()
        yield
    library.forget()


def flags_of(flags: tuple[str, ...]) -> Callable[[Level, str], tuple[str, ...]]:
    """`compiler.flags` for a build of one's own, whatever the level."""
    return lambda _, dtype: (*flags, *compiler.DTYPES[dtype])
