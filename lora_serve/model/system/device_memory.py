"""The device's memory as torch and the machine report it: free bytes, used bytes, and errors that mean it is short."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from lora_serve.core.errors import DeviceMemoryError, is_out_of_memory
from lora_serve.model.system.process import free_in_container

R = TypeVar("R")


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    machine = _available_memory() or int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    container = free_in_container()
    return machine if container is None else min(machine, container)


def within_memory(device: torch.device, call: Callable[[], R]) -> R:
    """Calls `call`. Raises DeviceMemoryError after freeing what the attempt had allocated."""
    try:
        return call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    if device.type == "cuda":
        torch.cuda.empty_cache()  # pieces of the failed step too: not in the handler, whose traceback holds its tensors
    raise DeviceMemoryError("The device has no memory for this step.")


def peak_meter(device: torch.device, weight_bytes: int) -> Callable[[], int]:
    """A meter of the most bytes in use from now on: on CUDA as torch allocates them, else the growth of the process.

    `weight_bytes`: of the model that is loaded already, to be counted in.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: int(torch.cuda.max_memory_allocated(device))
    _forget_peak()
    others = _resident("VmRSS") - weight_bytes  # Python, libraries
    return lambda: max(0, _resident("VmHWM") - others)


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """The most bytes that `call` had allocated at any time, beside those that were there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    return _peak_on_cpu(call)


def _peak_on_cpu(call: Callable[[], object]) -> int:
    """The sum of all allocations and releases of this thread, in their order, at its highest.

    torch's older profiler tells them in order and prints nothing to stderr, unlike its newer one.
    """
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        call()
    finally:
        records = _disable_profiler_legacy()
    events = [event for thread in records for event in thread if str(event.kind()) == "memory_alloc"]
    now = most = 0
    for event in events:
        now += event.cpu_memory_usage()
        most = max(most, now)
    return most


def _available_memory() -> int | None:
    """The machine's memory that is available without swapping; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def _forget_peak() -> None:
    """Resets the kernel's record of the process's peak: loading a model takes more than keeping it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(what: str) -> int:
    """VmRSS: of this process now; VmHWM: at most. 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:")), 0)


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers, or a host tensor, on `device`; the copy may be under way on return."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    # torch's allocator of pinned memory keeps the piece until the copy is done
    return host.pin_memory().to(device, non_blocking=True)


def columns_to_device(columns: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each column [n] int64 on `device`, all in one copy."""
    flat = to_device([value for column in columns for value in column], torch.int64, device)
    return list(torch.split(flat, [len(column) for column in columns]))


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors' values in host memory, after one wait for all of them."""
    return copy_to_host(*tensors)() if any(tensor.is_cuda for tensor in tensors) else list(tensors)


def copy_to_host(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Begins to copy the values that the tensors have once all work is done that is queued by now. What it returns
    waits for them.
    """
    if not any(tensor.is_cuda for tensor in tensors):
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies
    found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[Tensor]:
        done.synchronize()
        return found

    return wait
