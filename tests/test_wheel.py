"""The wheel brings the kernels along, compiled; without gcc it is one of Python alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lora_serve.model.native import compiler

ROOT = Path(__file__).resolve().parents[1]
COMPILED = "lora_serve/model/native/compiled/"
QUICK_GCC = """#!/bin/sh
exec gcc "$@" -O0
"""
LOAD = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
from lora_serve.model.native import compiler as levels, library
found = []
for level in levels.available()[1:] or levels.available():
    os.environ[levels.VARIABLE] = level.name
    library.forget()
    for dtype in (torch.float32, torch.bfloat16):
        told = library.description(dtype)
        found.append((told.level, told.dtype, told.source, library.load(dtype).num_threads() > 0))
print(json.dumps([library.__file__, found]))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is made of, as a build leaves files beside it."""
    folder = tmp_path_factory.mktemp("wheel") / "sources"
    wanted = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "lora_serve"]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *wanted], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists() and not name.startswith("lora_serve/demo_data/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(sources: Path, compiler: Path, path: str) -> tuple[Path, str]:
    """The wheel of `sources`, and what its build said."""
    made = sources.parent / "made" / compiler.name
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", str(made), str(sources)],
        env=os.environ | {"CC": str(compiler), "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    (wheel,) = made.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    quick = sources.parent / "quick-gcc"
    quick.write_text(QUICK_GCC)
    quick.chmod(0o700)
    stale = sources / "build" / "lib" / COMPILED
    stale.mkdir(parents=True)
    (stale / "kernels-avx2-float32-0123456789abcdef.so").write_bytes(b"of an earlier build")
    return build(sources, quick, os.environ["PATH"])[0]


def test_wheel_holds_the_kernels_of_every_level_and_is_for_any_python(wheel: Path) -> None:
    found = compiler.find()
    assert found is not None
    assert wheel.name.endswith(f"_{found.machine}.whl")
    assert "-py3-none-manylinux_2_28_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {compiler.file_name(level, dtype) for level, dtype in compiler.variants(found.machine)}
    assert {name.removeprefix(COMPILED) for name in names if name.startswith(COMPILED)} == wanted
    assert {file.name for file in compiler.SOURCE.parent.glob("*.[ch]")} <= {Path(name).name for name in names}


def test_wheels_kernels_are_loaded_on_a_machine_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    installed, cache = tmp_path / "installed", tmp_path / "cache"
    zipfile.ZipFile(wheel).extractall(installed)
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(cache), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(installed)], env=environment, cwd=tmp_path, capture_output=True, check=True
    )
    place, found = json.loads(done.stdout)
    assert Path(place).is_relative_to(installed)
    assert {(source, runs) for _, _, source, runs in found} == {("shipped", True)}
    assert {dtype for _, dtype, _, _ in found} == {"float32", "bfloat16"}
    assert not cache.exists()


def test_without_gcc_the_wheel_is_one_of_python_alone_and_says_so(sources: Path, tmp_path: Path) -> None:
    wheel, said = build(sources, tmp_path / "nowhere", str(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")] == []
    assert "*** lora_serve: no gcc was found: this wheel has no compiled kernels" in said


def test_wheel_brings_the_consoles_page(wheel: Path) -> None:
    folder = ROOT / "lora_serve" / "console" / "static"
    wanted = {f"lora_serve/console/static/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        assert len(wanted) > 40
        assert wanted <= {*archive.namelist()}
