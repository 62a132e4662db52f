"""The engine's process: `python -m lora_serve.engine_host.child FD`, started by `process.py` and by nobody else.

It ends with its parent, whatever becomes of that: at the end of the socket pair, and on Linux at once by a signal.
Signals to the whole group are the parent's affair: it says what to do.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Protocol

from lora_serve.client import wire
from lora_serve.engine_host.channel import Channel
from lora_serve.engine_host.fatal import FAILED, fatal

_PR_SET_PDEATHSIG = 1  # sys/prctl.h


class Taker(Protocol):
    """What runs in the process; both are called on its main thread."""

    def take(self, record: wire.ToEngine) -> None:
        """Returns at once."""

    def stop(self) -> None:
        """Returns when nothing of it runs any more."""


def main() -> int:
    """Returns when the parent says so; the process ends at once when the parent is gone."""
    channel, records = open_channel()
    configure = next(records, None)
    if not isinstance(configure, wire.Configure):
        return 1
    from lora_serve.engine_host.child_engine import ChildEngine  # torch: after the parent can be heard

    return run(ChildEngine(configure, channel), channel, records)


def open_channel() -> tuple[Channel, Iterator[wire.ToEngine]]:
    """What every engine's process does first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[-1]))
    end.set_inheritable(False)
    channel = Channel(end)
    return channel, channel.records()


def run(engine: Taker, channel: Channel, records: Iterator[wire.ToEngine]) -> int:
    """Hand over what comes, until the end."""
    with fatal("what listens to the server"):
        for record in records:
            if isinstance(record, wire.Stop):
                engine.stop()
                channel.close()
                return 0
            engine.take(record)
    os._exit(FAILED)  # the parent is gone, and nothing here is worth a moment


if __name__ == "__main__":
    sys.exit(main())
