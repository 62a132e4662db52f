"""Compiles the native kernels into the wheel, one library for each level of processor and type of numbers.

Without gcc the wheel is one of Python alone, and says so: its server compiles at its first start, or runs on torch's
own operators. A checkout that is installed editable compiles at its first start too. CC=aarch64-linux-gnu-gcc makes
the wheel for arm64.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from lora_serve.model.native import compiler  # noqa: E402 - needs neither torch nor the package installed

TORCHS_GLIBC = (2, 28)  # PyTorch's own wheels need it as well


class BuildKernels(build_py):
    """Copies the package and puts the compiled kernels into the copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            build(Path(self.build_lib) / compiler.SHIPPED.relative_to(ROOT))


class KernelWheel(bdist_wheel):
    """Names the machine that the kernels are for, and no Python of theirs: they are loaded through ctypes."""

    def run(self) -> None:
        self.run_command("build")
        self.kernels = [*Path(self.get_finalized_command("build_py").build_lib).glob("**/kernels-*.so")]
        if self.kernels:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        kernels = getattr(self, "kernels", [])
        if not kernels:
            return super().get_tag()
        machine = machine_of(kernels[0])
        needs = max(version for kernel in kernels for version in glibc_versions(kernel))
        family = "manylinux_{}_{}".format(*TORCHS_GLIBC) if (0,) < needs <= TORCHS_GLIBC else "linux"
        return "py3", "none", f"{family}_{machine}"


def build(folder: Path) -> None:
    """Fills `folder` with the kernels of these sources, and of no others."""
    found = compiler.find() if sys.platform == "linux" else None
    if found is None or not found.is_gcc:
        shutil.rmtree(folder, ignore_errors=True)
        say("no gcc was found: this wheel has no compiled kernels")
        return
    wanted = {compiler.file_name(*variant): variant for variant in compiler.variants(found.machine)}
    for file in folder.glob("*"):
        if file.name not in wanted or not compiler.is_whole(file) or machine_of(file) != found.machine:
            file.unlink()

    def make(name: str) -> None:
        try:
            compiler.compile_kernels(found, *wanted[name], folder / name)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"this wheel has no kernels for {' in '.join(reversed(name.split('-')[1:3]))}: {error}")

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(make, [name for name in wanted if not (folder / name).exists()]))


def machine_of(file: Path) -> str:
    """The machine in an ELF file's header."""
    return {62: "x86_64", 183: "aarch64"}[int.from_bytes(file.read_bytes()[18:20], "little")]


def glibc_versions(file: Path) -> Iterator[tuple[int, ...]]:
    """The versions of GNU's C library that a shared object asks for; (0,): none."""
    yield (0,)
    for found in re.findall(rb"GLIBC_([0-9.]+)", file.read_bytes()):
        yield tuple(map(int, found.split(b".")))


def say(line: str) -> None:
    more = "Where it serves, gcc must compile them, else the server is many times slower."
    print(f"\n*** lora_serve: {line}.\n*** {more}\n", file=sys.stderr)


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": KernelWheel})
