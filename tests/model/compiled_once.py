"""Each build of the kernels compiled once a run: whichever test of whichever worker asks first, others take a copy."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from pathlib import Path

from lora_serve.model.native import compiler
from lora_serve.model.native.compiler import Level

COMPILE = compiler.compile_kernels  # for tests of the compiling itself


class CompiledOnce:
    """In the place of `compiler.compile_kernels`. `folder`: the workers' own and common one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, found: compiler.Compiler, level: Level, dtype: str, target: Path) -> None:
        if Path(found.path).name not in ("gcc", "cc"):  # a test's own, of which it wants to see what it does
            COMPILE(found, level, dtype, target)
            return
        identity = f"{found} {compiler.file_name(level, dtype)}"  # with the digest of sources and flags
        kept = self._folder / hashlib.sha256(identity.encode()).hexdigest()
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                COMPILE(found, level, dtype, kept)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kept, target)
        target.chmod(0o755)
