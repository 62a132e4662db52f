"""The compiled kernels of this process: one library per type of numbers, at the level of the processor at hand.

Looked for in the wheel, then among those that this machine compiled before; else they are compiled now. Both are found
by a name with the digest of their sources, so that those of other sources are never taken. Files that are not whole,
or not this user's, are not loaded: whatever a library holds runs in this process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from lora_serve.core.model_spec import KernelDescription
from lora_serve.model.native import compiler
from lora_serve.model.system.threads import openmp

_log = logging.getLogger(__name__)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_FUNCTIONS = (
    "code_unit", "coded_linear",
    "decoder_layer", "experts", "experts_room", "gated", "latent_attention", "latent_room", "latent_store", "lora_add",
    "num_threads", "pack", "packed_linear", "paged_attention", "panel_outputs", "queries_together", "rms_norm",
    "room_bytes", "rotate_store", "words_of_codes", "words_of_panel",
)  # fmt: skip
_WRITABLE_BY_OTHERS = 0o022
ADDRESS, SIZE = ctypes.c_void_p, ctypes.c_int64


def load(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels whose `real` is `dtype`. Raises OSError or SubprocessError with the reason, ConfigError."""
    return _loaded(dtype)[0]


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the kernels cannot serve tensors of `device` and `dtype`; None: they can. Raises ConfigError."""
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype not in _NAMES:
        return f"knows {' and '.join(_NAMES.values())}, not {str(dtype).removeprefix('torch.')}"
    return _problem(dtype)


def description(dtype: torch.dtype = torch.float32) -> KernelDescription:
    """The kernels that serve a model of `dtype` on the CPU; they are loaded if they are not yet. Raises ConfigError."""
    name = str(dtype).removeprefix("torch.")
    reason = why_not(torch.device("cpu"), dtype)
    if reason is not None:
        return KernelDescription("none", name, "none", "torch", reason)
    level = compiler.serving(compiler.current(), name)
    order = level.bfloat16_order if dtype == torch.bfloat16 else "plain"
    return KernelDescription(level.name, name, order, _loaded(dtype)[1])


def forget() -> None:
    """Forgets what was loaded and what failed: the next call looks again."""
    _loaded.cache_clear()
    _problem.cache_clear()


@functools.cache
def _problem(dtype: torch.dtype) -> str | None:
    """Tried once: a failure would repeat at every layer of a model."""
    try:
        load(dtype)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    return None


@functools.cache
def _loaded(dtype: torch.dtype) -> tuple[ctypes.CDLL, str]:
    """The library, and where it came from."""
    name = _NAMES[dtype]
    level = compiler.serving(compiler.current(), name)
    openmp()  # its functions are found before the kernels' own
    file = compiler.file_name(level, name)
    found, source = _opened(compiler.SHIPPED / file), "shipped"
    if found is None:
        found, source = _kept(file), "compiled"
    if found is not None:
        _warn_of_one_thread(found, "torch's OpenMP runtime was not found")
        return found, source
    found = _compiled(level, name, file)
    _warn_of_one_thread(found, "clang's OpenMP is another than torch's: install gcc")
    return found, "compiled"


def _warn_of_one_thread(kernels: ctypes.CDLL, reason: str) -> None:
    if kernels.num_threads() < torch.get_num_threads():
        _log.warning("kernels: they run on one core only: %s", reason)


def _opened(place: Path) -> ctypes.CDLL | None:
    """The kernels in the file; None with a line of the log if it is there and cannot be used."""
    try:
        return _open(place) if place.exists() else None
    except OSError as error:
        _log.warning("kernels: %s cannot be loaded: %s", place, error)
        return None


def _open(place: Path) -> ctypes.CDLL:
    """Raises OSError with the reason, e.g. that it is of a newer C library than this machine's."""
    if not place.is_file():
        raise OSError("it is no file")
    if not compiler.is_whole(place):
        raise OSError("its content is not what was compiled: cut short, changed, or stripped")
    kernels = ctypes.CDLL(str(place))
    if missing := [name for name in _FUNCTIONS if not hasattr(kernels, name)]:
        raise OSError(f"it lacks {', '.join(missing)}")
    return kernels


def _compiled(level: compiler.Level, dtype: str, file: str) -> ctypes.CDLL:
    """The kernels, compiled now, and kept for the next start if they can be. Raises OSError and SubprocessError."""
    found = compiler.find()
    if found is None:
        raise OSError("no C compiler (gcc, cc or clang) was found")
    if not found.is_gcc:
        file = f"one-thread-{file}"
        if (kept := _kept(file)) is not None:
            return kept
    _log.info("kernels: %s compiles those of %s in %s, once per machine", found.path, level.name, dtype)
    if (cache := usable_cache()) is not None:
        try:
            return _made(found, level, dtype, file, cache)
        except OSError as error:  # e.g. its disk is full, or may hold no programs
            _log.warning("kernels: not compiled in %s, tried in a temporary folder: %s", cache, error)
    return _made(found, level, dtype, file, None)


def _made(found: compiler.Compiler, level: compiler.Level, dtype: str, file: str, cache: Path | None) -> ctypes.CDLL:
    """Compiles in a folder of this process alone, which goes afterwards. Raises OSError and SubprocessError."""
    with tempfile.TemporaryDirectory(prefix="lora_serve-", dir=cache) as folder:
        made = Path(folder) / file
        compiler.compile_kernels(found, level, dtype, made)
        kernels = _open(made)  # under a new path: that of a file which was opened before would mean that one
        if cache is not None:
            _keep(made, cache / file)
    return kernels


def _keep(made: Path, place: Path) -> None:
    try:
        made.replace(place)
    except OSError as error:
        _log.warning("kernels: they are compiled again at the next start: %s", error)


def usable_cache() -> Path | None:
    """The folder that keeps kernels; None with a line of the log if it cannot."""
    try:
        return cache_folder()
    except (OSError, RuntimeError) as error:
        _log.warning("kernels: no cache can be used, they are compiled at every start: %s", error)
        return None


def cache_folder() -> Path:
    """The folder of what this machine makes once, made if it is not there. Raises OSError and RuntimeError if it cannot
    be used.
    """
    cache = _cache()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(cache)
    tempfile.TemporaryDirectory(dir=cache).cleanup()
    return cache


def _kept(file: str) -> ctypes.CDLL | None:
    """The kernels that this machine compiled before."""
    try:
        place = _cache() / file
        if not place.exists():
            return None
        _check_owner(place.parent)
        _check_owner(place)
    except (OSError, RuntimeError) as error:
        _log.warning("kernels: those compiled before are passed over: %s", error)
        return None
    return _opened(place)


def _check_owner(path: Path) -> None:
    """Raises OSError if another user than root might have written it."""
    if (owner := _owner(path)) not in (os.geteuid(), 0):
        raise OSError(f"{path} belongs to another user, of number {owner}")
    if path.stat().st_mode & _WRITABLE_BY_OTHERS:
        raise OSError(f"{path} is writable by other users (chmod go-w)")


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _cache() -> Path:
    """The user's folder, whether it is there or not; a relative XDG_CACHE_HOME counts for nothing, says its standard.

    Raises RuntimeError if the user has no folder.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lora_serve"
