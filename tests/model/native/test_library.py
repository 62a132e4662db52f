"""Where kernels come from: the wheel, the cache, a compiler; and without any of them."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lora_serve.core.errors import ConfigError
from lora_serve.model.attention import create_attention
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.native import compiler, library, operators
from lora_serve.model.native.compiler import Level
from lora_serve.model.system.threads import openmp
from tests.local_engine import LocalEngine
from tests.model.compiled_once import COMPILE
from tests.model.native.conftest import flags_of
from tests.model.tiny import filled_cache
from tests.oracle import save_adapter, save_tiny_model
from tests.tiers import mostly_nightly

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
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how a compiler's file is made: none is a copy of another test's. Its functions do nothing."""
    monkeypatch.setattr(compiler, "compile_kernels", COMPILE)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tile.h").write_text("/* nothing */\n")
    functions = [f"long {name}(void) {{ return 1; }}" for name in library._FUNCTIONS]
    (sources / "kernels.c").write_text("\n".join(['#include "tile.h"', *functions]))
    monkeypatch.setattr(compiler, "SOURCE", sources / "kernels.c")


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


def assert_kept() -> None:
    """Another process would find the kernels, and compile nothing."""
    library.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_kernels", lambda *_: pytest.fail("compiled again"))
        assert library.why_not(CPU, torch.float32) is None


@pytest.mark.usefixtures("compiles")
def test_kernels_are_compiled_once_per_machine(empty_cache: Path) -> None:
    assert library.why_not(CPU, torch.float32) is None
    assert library.description().source == "compiled"
    assert [path.name.partition("-")[0] for path in empty_cache.iterdir()] == ["kernels"]
    assert_kept()


@pytest.mark.usefixtures("compiles")
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
    made = ship(empty_cache)
    made.unlink()  # it is mapped in this process
    made.write_bytes(b"no library")
    with caplog.at_level(logging.WARNING):
        assert library.description().source == "compiled"
    assert "cannot be loaded" in caplog.text


def broken(made: Path, content: bytes) -> None:
    made.unlink()  # it is mapped in this process
    made.write_bytes(content)


def without(function: str) -> Callable[[Level, str], tuple[str, ...]]:
    """Flags with which the kernels lack a function."""
    return flags_of((*QUICK, f"-D{function}=another_{function}"))


PARTS = [slice(3000), slice(0), slice(-1), slice(1, None)]


@pytest.mark.parametrize("kept", mostly_nightly(PARTS, slice(3000)))
def test_part_of_a_file_is_not_loaded_but_compiled_again_over_it(
    empty_cache: Path, kept: slice, caplog: pytest.LogCaptureFixture
) -> None:
    library.load(torch.float32)
    (made,) = empty_cache.iterdir()
    whole = made.read_bytes()
    broken(made, whole[kept])
    code = f"import torch; from lora_serve.model.native import library; print(library._kept({made.name!r}))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (child.returncode, child.stdout) == (0, b"None\n")  # not ended by a signal
    library.forget()
    assert library.description().source == "compiled"
    assert f"{made} cannot be loaded: its content is not what was compiled" in caplog.text
    assert list(empty_cache.iterdir()) == [made]
    assert compiler.is_whole(made)


@pytest.mark.usefixtures("compiles")
def test_content_is_on_the_disk_before_the_name(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), sync(file))[1])
    monkeypatch.setattr(Path, "replace", lambda *paths: (calls.append("replace"), replace(*paths))[1])
    library.load(torch.float32)
    assert calls == ["fsync", "replace", "replace"]


def test_kernels_that_lack_a_function_are_compiled_again(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = compiler.find()
    assert found is not None
    for folder in (compiler.SHIPPED, empty_cache):
        folder.mkdir(parents=True, mode=0o700)
        with monkeypatch.context() as patch:
            name = compiler.file_name(*(variant := (compiler.serving(compiler.current(), "float32"), "float32")))
            patch.setattr(compiler, "flags", without("rms_norm"))
            compiler.compile_kernels(found, *variant, folder / name)
    assert library.load(torch.float32).rms_norm is not None
    assert library.description().source == "compiled"
    for folder in (compiler.SHIPPED, empty_cache):
        assert f"{folder / name} cannot be loaded: it lacks rms_norm" in caplog.text


@pytest.mark.usefixtures("compiles")
def test_what_a_compiler_makes_wrong_is_a_reason_and_torch_serves(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "flags", without("lora_add"))
    assert library.why_not(CPU, torch.float32) == "it lacks lora_add"
    assert library.description().source == "torch"
    assert list(empty_cache.iterdir()) == []


def test_relative_cache_folder_counts_for_nothing(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    library.load(torch.float32)
    assert not (tmp_path / "here").exists()
    assert len(list((tmp_path / "home" / ".cache" / "lora_serve").iterdir())) == 1


def not_a_folder(cache: Path) -> None:
    cache.parent.write_text("a file")


def writable_by_others(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [(not_a_folder, "Not a directory|File exists"), (writable_by_others, "writable by other users")],
)
def test_cache_that_cannot_be_trusted_is_not_used(
    empty_cache: Path,
    prepare: Callable[[Path], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare(empty_cache)
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    modes: list[int] = []
    compile_kernels = compiler.compile_kernels

    def noting(found: compiler.Compiler, level: Level, dtype: str, target: Path) -> None:
        modes.append(target.parent.stat().st_mode & 0o777)
        assert target.is_relative_to(own)
        compile_kernels(found, level, dtype, target)

    monkeypatch.setattr(compiler, "compile_kernels", noting)
    assert library.description().source == "compiled"
    assert modes == [0o700]
    assert list(own.iterdir()) == []
    assert not empty_cache.is_dir() or list(empty_cache.iterdir()) == []
    assert re.search(f"no cache can be used, they are compiled at every start: .*({reason})", caplog.text)


def test_full_disk_of_the_cache_is_told_and_passed_by(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    empty_cache.parent.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", empty_cache.parent], check=False).returncode:
        monkeypatch.setattr(compiler, "_seal", no_room_in(empty_cache))
    try:
        assert library.description().source == "compiled"
        assert [*empty_cache.iterdir(), *own.iterdir()] == []
    finally:
        subprocess.run(["umount", "-l", empty_cache.parent], check=False, stderr=subprocess.DEVNULL)
    assert f"not compiled in {empty_cache}, tried in a temporary folder" in caplog.text
    assert "No space left on device" in caplog.text


def no_room_in(cache: Path) -> Callable[[Path], None]:
    """A seal for which the disk of the cache has no room: where no small disk can be mounted."""
    seal = compiler._seal

    def sealing(library: Path) -> None:
        if library.is_relative_to(cache):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        seal(library)

    return sealing


@pytest.mark.usefixtures("empty_cache")
def test_compiling_is_told_before_it_begins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    compile_kernels = compiler.compile_kernels
    monkeypatch.setattr(compiler, "compile_kernels", lambda *these: (told.append(caplog.text), compile_kernels(*these)))
    with caplog.at_level(logging.INFO):
        library.load(torch.float32)
    assert re.search("kernels: .* compiles those of .* in float32", told[0])


def test_folder_of_another_user_is_not_used(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty_cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(library, "_owner", lambda path: os.geteuid() + 12345)
    assert library.description().source == "compiled"
    assert f"{empty_cache} belongs to another user" in caplog.text
    assert list(empty_cache.iterdir()) == []


@pytest.mark.parametrize("other", [True, False])
def test_files_of_another_user_are_not_loaded_and_those_of_root_are(
    empty_cache: Path, other: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.load(torch.float32)
    library.forget()
    (made,) = empty_cache.iterdir()
    number = os.geteuid() + 12345 if other else 0
    monkeypatch.setattr(library, "_owner", lambda path: number if path == made else os.geteuid())
    opened: list[Path] = []
    monkeypatch.setattr(library, "_open", lambda place, open=library._open: (opened.append(place), open(place))[1])
    assert library.description().source == "compiled"
    assert (made in opened) is not other
    assert (f"passed over: {made} belongs to another user, of number {number}" in caplog.text) is other


def test_folder_in_the_place_of_the_file_is_told(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    library.load(torch.float32)
    library.forget()
    (made,) = empty_cache.iterdir()
    made.unlink()
    made.mkdir(mode=0o700)
    assert library.description().source == "compiled"
    assert f"{made} cannot be loaded: it is no file" in caplog.text
    assert "compiled again at the next start: [Errno 21] Is a directory" in caplog.text
    assert list(empty_cache.iterdir()) == [made]


@pytest.mark.usefixtures("compiles")
def test_a_wide_umask_leaves_kernels_that_are_loaded_again(empty_cache: Path) -> None:
    before = os.umask(0)
    try:
        library.load(torch.float32)
    finally:
        os.umask(before)
    assert_kept()


def test_compiler_that_fails_is_told_in_its_own_words_and_asked_no_more(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    noting = f"import sys\nif '-c' in sys.argv: open({str(calls)!r}, 'a').write('x'); sys.exit('out of vectors')"
    monkeypatch.setenv("CC", str(program(tmp_path / "broken", noting)))
    for _ in range(3):
        assert "out of vectors" in str(library.why_not(CPU, torch.float32))
    assert calls.read_text() == "xx"  # in the cache, and out of it
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
    assert "no C compiler" in str(operators.why_not(torch.zeros(3, 4)))
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
