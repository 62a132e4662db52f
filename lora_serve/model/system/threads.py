"""The threads that compute: who has an OpenMP team.

GNU's OpenMP waits at the end of a parallel loop by spinning only as long as all of its threads in the process fit the
processor. One more team, even an idle one, and each wait is a sleep: on two cores a decode step took 1.4 times as long.
A team belongs to the thread that ran a parallel loop, and ends with it. So only the engine's thread has a team.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def use_one_core() -> None:
    """Makes the calling thread compute on one core from now on, so that it has no team."""
    torch.get_num_threads()  # torch sets a thread's number once, at its first use
    runtime = openmp()
    if runtime is not None:
        runtime.omp_set_num_threads(1)


@contextmanager
def one_core() -> Iterator[None]:
    """Makes the calling thread compute on one core inside the block: it waits for no team, which takes long where other
    threads keep the cores busy.
    """
    before, runtime = torch.get_num_threads(), openmp()
    use_one_core()
    try:
        yield
    finally:
        if runtime is not None:
            runtime.omp_set_num_threads(before)


@functools.cache
def openmp() -> Any:
    """torch's own OpenMP, whose functions every library finds from then on; None where it is of another kind."""
    path = openmp_path()
    return None if path is None else ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def openmp_path() -> Path | None:
    """The file of torch's own OpenMP."""
    package = Path(torch.__file__).parent
    found = [file for folder in (package / "lib", package.with_name("torch.libs")) for file in folder.glob("libgomp*")]
    return min(found, default=None)
