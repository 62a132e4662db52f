"""The end of the process: signals, draining, and exits in time even if a thread hangs (on a disk that is gone)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from typing import Any

from lora_serve.logs.handler import flush_log
from lora_serve.server.lifecycle import Lifecycle
from lora_serve.server.sockets.listener import ServerTls

ENDING_SECONDS = 60.0  # from the end of the drain until everything is closed
EXIT_SECONDS = 5.0  # from there on; threads that still hang are left behind
GAVE_UP = 3  # exit code: the engine was lost for good
CUT = 4  # exit code: told to stop, and requests still ran when --shutdown-timeout was over
FAILED_SECONDS = 5.0  # during which /health answers 503 before the process ends
_log = logging.getLogger(__name__)


def end_within(seconds: float, code: int) -> None:
    """Exits with `code` if the process still runs after `seconds`."""
    timer = threading.Timer(seconds, _end, (code,))
    timer.daemon = True
    timer.name = "last resort"
    try:
        timer.start()
    except RuntimeError:  # no memory for a thread
        signal.signal(signal.SIGALRM, lambda number, frame: _end(code))
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _end(code: int) -> None:
    main, own = threading.main_thread(), threading.current_thread()
    names = sorted(t.name for t in threading.enumerate() if t not in (main, own) and not t.daemon)
    _log.warning("what still runs is left behind: %s", ", ".join(names) or "the main thread")
    flush_log()
    os._exit(code)


async def drain(lifecycle: Lifecycle, timeout: float) -> int:
    """Waits until running requests have ended, `timeout` seconds at most; returns the exit code, 0 or CUT."""
    _log.info("draining %d requests", lifecycle.num_inside)
    if await lifecycle.drain(timeout):
        return 0
    _log.warning("%d requests did not end in time; exit code %d", lifecycle.num_inside, CUT)
    return CUT


async def give_up(lifecycle: Lifecycle, reason: str, stopped: asyncio.Future[Any]) -> None:
    """Answers /health with 503 for FAILED_SECONDS, then ends the process without waiting for hanging threads."""
    _log.critical("the engine is lost for good: %s", reason)
    lifecycle.fail("The engine is lost; the server has to be started again.")
    await asyncio.wait({stopped}, timeout=FAILED_SECONDS)
    flush_log()
    os._exit(GAVE_UP)


def on_signals(stop: asyncio.Event, tls: ServerTls | None) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once; SIGHUP is for a renewed certificate."""

    def handle() -> None:
        if stop.is_set():
            flush_log()
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    if tls is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, tls.reload)
