"""The engine's process: `python -m lora_serve.engine_host.child FD`, started by the process engine host.

The process ends with its parent, however that ends: at the end of the socket pair, and on Linux at once by a signal.
Signals to the whole group are ignored: the parent says what to do.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Protocol

from lora_serve.core.messages import Configure, Stop, ToEngine
from lora_serve.core.process import without_collections
from lora_serve.engine_host.channel import FAILED, Channel, fatal
from lora_serve.model.system.process import load_torch_library

_PR_SET_PDEATHSIG = 1  # sys/prctl.h


class RunningEngine(Protocol):
    """The engine of a process; both methods are called on the main thread."""

    def take(self, message: ToEngine) -> None:
        """Handle a message; returns at once."""

    def stop(self) -> None:
        """Returns when no part of the engine runs any more."""


def main() -> int:
    """Returns when the parent says so; the process ends at once when the parent is gone."""
    load_torch_library()
    channel, messages = open_channel()
    configure = next(messages, None)
    if not isinstance(configure, Configure):
        return 1
    try:
        with without_collections():
            from lora_serve.engine_host.service import ChildEngine  # after the parent can be heard

            importlib.import_module("lora_serve.model.loading.transformers_import")  # torch

        engine = ChildEngine(configure, channel)
    except Exception as error:
        channel.refuse(error)
    return run(engine, channel, messages)


def open_channel() -> tuple[Channel, Iterator[ToEngine]]:
    """The channel to the parent and the messages from it; every engine's process opens it first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[-1]))
    end.set_inheritable(False)
    channel = Channel(end)
    return channel, channel.messages()


def run(engine: RunningEngine, channel: Channel, messages: Iterator[ToEngine]) -> int:
    """Hand each message to the engine, until the end."""
    with fatal("the thread that listens to the server"):
        for message in messages:
            if isinstance(message, Stop):
                engine.stop()
                channel.close()
                return 0
            engine.take(message)
    os._exit(FAILED)  # the parent is gone, and nothing here is worth a moment


if __name__ == "__main__":
    sys.exit(main())
