"""Where kernels come from: the wheel, the cache, a compiler; and without any of them."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lora_serve.core.errors import ConfigError
from lora_serve.model.attention import create_attention
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.native import compiler, library, packed_linear
from lora_serve.model.system.threads import openmp
from tests.local_engine import LocalEngine
from tests.model.native.conftest import flags_of
from tests.model.tiny import filled_cache
from tests.oracle import save_adapter, save_tiny_model

CPU = torch.device("cpu")
QUICK = ("-O0", "-fPIC", "-fopenmp", "-Wno-psabi")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a machine that has compiled nothing yet; what it compiles is not optimised."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(compiler, "flags", flags_of(QUICK))
    library.forget()
    yield tmp_path / "cache" / "lora_serve"
    library.forget()


@pytest.fixture
def no_compiler(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "nowhere"))


def program(path: Path, lines: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{lines}\n")
    path.chmod(0o700)
    return path


def ship(empty_cache: Path) -> Path:
    """Moves what is compiled now to where a wheel has it."""
    library.load(torch.float32)
    (made,) = empty_cache.iterdir()
    compiler.SHIPPED.mkdir()
    library.forget()
    return Path(shutil.move(made, compiler.SHIPPED))


def test_kernels_are_compiled_once_per_machine(empty_cache: Path) -> None:
    assert library.why_not(CPU, torch.float32) is None
    assert library.description().source == "compiled"
    assert [path.name.partition("-")[0] for path in empty_cache.iterdir()] == ["kernels"]
    library.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_kernels", lambda *_: pytest.fail("compiled again"))
        assert library.why_not(CPU, torch.float32) is None


def test_other_flags_types_and_sources_are_other_libraries(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load(torch.float32)
    library.load(torch.bfloat16)
    library.forget()
    monkeypatch.setattr(compiler, "flags", flags_of((*QUICK, "-DANOTHER")))
    library.load(torch.float32)
    library.forget()
    changed = shutil.copytree(compiler.SOURCE.parent, tmp_path / "changed")
    (changed / "tile.h").write_text((changed / "tile.h").read_text() + "/* a change */\n")
    monkeypatch.setattr(compiler, "SOURCE", changed / "kernels.c")
    library.load(torch.float32)
    assert len(list(empty_cache.iterdir())) == 4


@pytest.mark.usefixtures("no_compiler")
def test_kernels_of_the_wheel_need_no_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.defpath)
        ship(empty_cache)
    assert library.description().source == "shipped"
    assert library.description().reason == ""
    assert list(empty_cache.iterdir()) == []


def test_kernels_of_other_sources_are_not_taken_from_a_wheel(empty_cache: Path) -> None:
    made = ship(empty_cache)
    made.rename(made.with_name(made.name.replace(made.stem[-16:], "0" * 16)))
    assert library.description().source == "compiled"


def test_kernels_that_cannot_be_loaded_are_told_and_passed_over(
    empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ship(empty_cache).write_bytes(b"no library")
    with caplog.at_level(logging.WARNING):
        assert library.description().source == "compiled"
    assert "cannot be loaded" in caplog.text


def test_compiler_that_fails_is_told_in_its_own_words_and_asked_once(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    noting = f"import sys\nif '-c' in sys.argv: open({str(calls)!r}, 'a').write('x'); sys.exit('out of vectors')"
    monkeypatch.setenv("CC", str(program(tmp_path / "broken", noting)))
    for _ in range(3):
        assert "out of vectors" in str(library.why_not(CPU, torch.float32))
    assert calls.read_text() == "x"
    assert list(empty_cache.iterdir()) == []
    assert library.description().source == "torch"
    assert "out of vectors" in library.description().reason


def test_clangs_kernels_run_on_one_thread_and_give_way_to_gccs(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    acting = "import os, sys\nif '--version' in sys.argv: sys.exit(print('clang version 14'))\n"
    acting += "os.execvp('gcc', ['gcc', *sys.argv[1:]])"
    monkeypatch.setenv("CC", str(program(tmp_path / "clang", acting)))
    assert library.load(torch.float32).num_threads() == 1
    assert "they run on one core only: clang's OpenMP is another than torch's: install gcc" in caplog.text
    assert [path.name.startswith("one-thread-kernels-") for path in empty_cache.iterdir()] == [True]
    monkeypatch.delenv("CC")
    library.forget()
    library.load(torch.float32)
    assert sorted(path.name.startswith("one-thread-") for path in empty_cache.iterdir()) == [False, True]


def test_kernels_share_torchs_threads_and_run_alone_without_a_runtime(empty_cache: Path) -> None:
    runtime = openmp()
    cores = runtime.omp_get_max_threads()
    for number in (3, cores):
        runtime.omp_set_num_threads(number)
        assert library.load(torch.float32).num_threads() == number
    (made,) = empty_cache.iterdir()
    code = f"import ctypes; print(ctypes.CDLL({str(made)!r}).num_threads())"
    alone = subprocess.run([sys.executable, "-c", code], env={"OMP_NUM_THREADS": "3"}, capture_output=True, check=True)
    assert alone.stdout == b"1\n"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_refused_in_words(dtype: torch.dtype) -> None:
    assert "knows float32 and bfloat16, not float" in str(library.why_not(CPU, dtype))
    assert library.description(dtype).source == "torch"
    assert library.why_not(torch.device("cuda"), torch.float32) == "runs on the CPU only"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torchs_own_operators_are_chosen() -> None:
    assert "no C compiler" in str(library.why_not(CPU, torch.float32))
    assert "no C compiler" in str(packed_linear.why_not(torch.zeros(3, 4)))
    linear = torch.nn.Linear(4, 3)
    frozen, x = FrozenLinear(linear), torch.randn(2, 4)
    assert frozen.packed is None
    assert torch.allclose(frozen(x), linear(x), atol=1e-6)
    assert type(create_attention("auto", filled_cache(4, 4, 2, 8))).__module__.endswith(".sdpa")
    with pytest.raises(ConfigError, match="no C compiler"):
        create_attention("native", filled_cache(4, 4, 2, 8))


def test_without_a_compiler_answers_are_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    adapters = {name: save_adapter(model, tmp_path / name, seed=i) for i, name in enumerate("ab")}

    def answers() -> list[tuple[list[int], list[float]]]:
        engine = LocalEngine(
            model, adapters, block_size=4, kv_cache_memory="100KiB", max_num_batched_tokens=16, max_num_seqs=4,
        )  # fmt: skip
        prompts = [([5, 6, 7], None), (list(range(20, 50)), "a"), ([9], "b")]
        found = engine.run([engine.request(p, a, max_tokens=6, logprobs=1, ignore_eos=True) for p, a in prompts])
        return [(one.token_ids, [item.logprob for item in one.logprobs if item is not None]) for one in found]

    native = answers()
    request.getfixturevalue("no_compiler")
    for (tokens, logprobs), (wanted_tokens, wanted) in zip(answers(), native, strict=True):
        assert tokens == wanted_tokens
        assert logprobs == pytest.approx(wanted, abs=1e-4)
