"""Compiles `kernels.c` for a level of processor and a type of numbers; without torch, as wheels are built with it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lora_serve.core import process
from lora_serve.core.errors import ConfigError

_log = logging.getLogger(__name__)
VARIABLE = process.KERNELS
_SYSCALL_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # asm/prctl.h: ARCH_REQ_XCOMP_PERM
_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}


@dataclass(frozen=True, slots=True)
class Level:
    """The instructions that kernels are compiled for; the processor needs all of `features`."""

    name: str
    features: frozenset[str]  # as /proc/cpuinfo spells them
    flags: tuple[str, ...]  # of the compiler
    bfloat16_order: str = "dot"  # of the sums of bfloat16 products: that of VDPBF16PS, or `blocks`, that of TDPBF16PS
    multiplies_bfloat16: bool = False  # faster than float32


GENERIC = Level("generic", frozenset(), ())
X86_LEVELS = (  # the best last
    Level("avx2", _AVX2, ("-march=x86-64-v3",)),
    Level("avx512", _AVX512, ("-march=x86-64-v4",)),
    Level("avx512_bf16", _AVX512_BF16, ("-march=x86-64-v4", "-mavx512bf16"), multiplies_bfloat16=True),
    Level(
        "amx",
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "blocks",
        multiplies_bfloat16=True,
    ),
)
LEVELS = {level.name: level for level in (GENERIC, *X86_LEVELS)}


def current() -> Level:
    """The best level of this machine, or a lower one that LORA_SERVE_KERNELS names. Raises ConfigError."""
    allowed = available()
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return allowed[-1]
    if name not in LEVELS:
        raise ConfigError(f"{VARIABLE}={name}: not one of {', '.join(LEVELS)}")
    if LEVELS[name] not in allowed:
        raise ConfigError(
            f"{VARIABLE}={name}: this machine has not what it needs; possible here: "
            f"{', '.join(level.name for level in allowed)}"
        )
    return LEVELS[name]


def serving(level: Level, dtype: str) -> Level:
    """The level whose kernels serve `dtype` ("float32", "bfloat16") at `level`: float32 needs no bfloat16 products."""
    return LEVELS["avx512"] if dtype == "float32" and level.multiplies_bfloat16 else level


@functools.cache
def available() -> tuple[Level, ...]:
    """The levels that this machine runs, the best last."""
    features = _features()
    found = [level for level in X86_LEVELS if level.features <= features]
    if LEVELS["amx"] in found and not _may_use_tiles():
        found.remove(LEVELS["amx"])
    return (GENERIC, *found)


def _features() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _may_use_tiles() -> bool:
    """Asks the kernel for AMX's registers, as every process must once; its threads and children have them then."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(_SYSCALL_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    _log.warning("kernels: this processor has AMX, but the system refuses its tiles (%s): a lower level serves", reason)
    return False


SOURCE = Path(__file__).with_name("kernels.c")
SHIPPED = Path(__file__).with_name("compiled")  # what the wheel brings along
DTYPES = {"float32": (), "bfloat16": ("-DREAL_IS_BFLOAT16",)}
_FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
_GCC_FLAGS = (
    "-fopenmp",  # clang's OpenMP is another than torch's
    # Fused multiply-adds everywhere or nowhere: for some processors GCC leaves out those of single chains, and then one
    # token's sums are not those of three.
    "--param=avoid-fma-max-bits=0",
)
_NAMES = ("gcc", "cc", "clang")
_SEAL = b"lora_serve kernels, SHA-256 "  # after the ELF file, of which the loader reads no more than its headers say


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler of this machine."""

    path: str
    is_gcc: bool
    machine: str  # that it compiles for: "x86_64", "aarch64"


def find() -> Compiler | None:
    """$CC, else gcc, cc or clang: gcc before clang, whose kernels run on one thread."""
    for name in (os.environ.get("CC"), *_NAMES):
        if name and (path := shutil.which(name)):
            is_clang = "clang" in _output(path, "--version").lower()
            return Compiler(path, not is_clang, _output(path, "-dumpmachine").partition("-")[0])
    return None


def flags(level: Level, dtype: str) -> tuple[str, ...]:
    """The flags of a variant, to which each compiler adds its own; `dtype` is a key of DTYPES."""
    return (*_FLAGS, *_GCC_FLAGS, *level.flags, *DTYPES[dtype])


def file_name(level: Level, dtype: str) -> str:
    """A name with the digest of all that the compiled kernels depend on."""
    texts = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    identity = repr((texts, flags(level, dtype)))
    return f"kernels-{level.name}-{dtype}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def variants(machine: str) -> list[tuple[Level, str]]:
    """The levels and types of numbers that a wheel for `machine` brings kernels of."""
    levels = X86_LEVELS if machine == "x86_64" else (GENERIC,)
    return [(level, dtype) for dtype in DTYPES for level in levels if serving(level, dtype) is level]


def is_whole(library: Path) -> bool:
    """True for a file as `compile_kernels` left it: loading a part of one would end the process. Raises OSError."""
    content, mark, digest = library.read_bytes().rpartition(_SEAL)
    return bool(mark) and digest == hashlib.sha256(content).digest()


def compile_kernels(compiler: Compiler, level: Level, dtype: str, target: Path) -> None:
    """Compiles into a temporary file and renames it, so that two servers starting at once never read half a file.

    A seal at its end tells a whole file from a part of one, e.g. of a full disk (`is_whole`). Linked with no OpenMP
    runtime: see `one_thread.h`. Raises OSError or SubprocessError with the reason.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    given = [flag for flag in flags(level, dtype) if compiler.is_gcc or flag not in _GCC_FLAGS]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        item, library = Path(folder) / "item.o", Path(folder) / "library.so"
        for arguments in (
            [*given, "-c", str(SOURCE), "-o", str(item)],
            ["-shared", str(item), "-lm", "-o", str(library)],
        ):
            done = subprocess.run([compiler.path, *arguments], capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                raise OSError(f"{compiler.path} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        _seal(library)
        library.replace(target)


def _seal(library: Path) -> None:
    with library.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.write(_SEAL + digest)
        file.flush()
        os.fchmod(file.fileno(), 0o755)  # whatever the umask: no other user may change it
        os.fsync(file.fileno())  # else a machine that stops may keep its name without its content


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
