"""The stream on which adapters are copied to a GPU, beside the one that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class CopyStream(Protocol):
    """Copies in the background; whoever needs a copy waits for its event."""

    def copying(self) -> AbstractContextManager[Any]:
        """What is enqueued within runs beside the computation. Yields the event of its end, set when it leaves."""

    def wait(self, event: Any) -> None:
        """What is computed from now on comes after the event; the calling thread itself does not wait."""


class CudaCopyStream:
    """See `CopyStream`. Not run on a GPU yet: the tests use a stream of their own in its place.

    A copy comes after all that was enqueued for computation before it: memory of a slot that was cleared may be given
    out again for the copy while a kernel that still reads it is under way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[Any]:
        """See `CopyStream`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield event
            event.record(self._stream)

    def wait(self, event: Any) -> None:
        """See `CopyStream`."""
        torch.cuda.current_stream(self._device).wait_event(event)


def copy_stream(device: torch.device) -> CopyStream | None:
    """The device's; None on the CPU, where nothing is copied."""
    return CudaCopyStream(device) if device.type == "cuda" else None
