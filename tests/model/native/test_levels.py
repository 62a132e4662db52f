"""Levels of processors: found by their features, forced lower, refused in words."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator

import pytest

from lora_serve.core.errors import ConfigError
from lora_serve.model.native import compiler

AVX2 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"
AVX512 = AVX2 + " avx512f avx512bw avx512cd avx512dq avx512vl"
PROCESSORS = {
    "fpu sse2": ["generic"],
    AVX2.replace(" fma", ""): ["generic"],
    AVX2: ["generic", "avx2"],
    AVX2 + " avx512f": ["generic", "avx2"],
    AVX512: ["generic", "avx2", "avx512"],
    AVX512 + " avx512_bf16": ["generic", "avx2", "avx512", "avx512_bf16"],
    AVX512 + " avx512_bf16 amx_tile amx_int8": ["generic", "avx2", "avx512", "avx512_bf16"],
    AVX512 + " avx512_bf16 amx_tile amx_bf16": ["generic", "avx2", "avx512", "avx512_bf16", "amx"],
}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Pretends to be a processor with so many features, which the kernel lets use its tiles."""

    def pretend(features: str) -> None:
        text = f"processor\t: 0\nflags\t\t: {features}\nbugs\t\t:\n\nprocessor\t: 1\nflags\t\t: {features}\n"
        monkeypatch.setattr(compiler.Path, "read_text", lambda path: text)
        compiler.available.cache_clear()

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler, "_may_use_tiles", lambda: True)
    monkeypatch.delenv(compiler.VARIABLE, raising=False)
    yield pretend
    compiler.available.cache_clear()


@pytest.mark.parametrize("features", PROCESSORS)
def test_processor_has_the_levels_whose_features_it_has(processor: Callable[[str], None], features: str) -> None:
    processor(features)
    assert [level.name for level in compiler.available()] == PROCESSORS[features]
    assert compiler.current().name == PROCESSORS[features][-1]


def test_without_the_kernels_permission_there_are_no_tiles(
    processor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_may_use_tiles", lambda: False)
    processor(AVX512 + " avx512_bf16 amx_tile amx_bf16")
    assert compiler.current().name == "avx512_bf16"


def test_other_machines_are_generic(processor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    processor("fp asimd bf16")
    assert compiler.current() is compiler.GENERIC


def test_permission_for_tiles_is_asked_of_the_kernel_and_a_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, ...]] = []

    class System:
        def syscall(self, *numbers: int) -> int:
            asked.append(numbers)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: System())
    monkeypatch.setattr(ctypes, "get_errno", lambda: 1)
    assert not compiler._may_use_tiles()
    assert "has AMX, but the system refuses its tiles (Operation not permitted): a lower level serves" in caplog.text
    assert asked == [(158, 0x1023, 18)]  # ARCH_REQ_XCOMP_PERM, XTILEDATA: Documentation/arch/x86/xstate.rst


def test_lower_level_may_be_forced(processor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    processor(AVX512 + " avx512_bf16")
    for name in ("generic", "avx2", "avx512", "avx512_bf16"):
        monkeypatch.setenv(compiler.VARIABLE, name)
        assert compiler.current().name == name


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("avx2", "this machine has not what it needs; possible here: generic"),
        ("amx", "possible here: generic"),
        ("AVX2", "not one of generic, avx2, avx512, avx512_bf16, amx"),
        ("fast", "LORA_SERVE_KERNELS=fast: not one of"),
    ],
)
def test_level_that_is_unknown_or_beyond_the_processor_is_refused(
    processor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, value: str, words: str
) -> None:
    processor("fpu sse2")
    monkeypatch.setenv(compiler.VARIABLE, value)
    with pytest.raises(ConfigError, match=words):
        compiler.current()


def test_float32_is_served_by_levels_without_bfloat16_products() -> None:
    found = {name: compiler.serving(level, "float32").name for name, level in compiler.LEVELS.items()}
    assert found == {
        "generic": "generic", "avx2": "avx2", "avx512": "avx512", "avx512_bf16": "avx512", "amx": "avx512"
    }  # fmt: skip
    assert all(compiler.serving(level, "bfloat16") is level for level in compiler.LEVELS.values())
