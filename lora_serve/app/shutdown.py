"""Ends the process in time even if a thread hangs, for instance on a disk that is gone."""

from __future__ import annotations

import logging
import os
import threading

from lora_serve.logs.handler import flush_log

ENDING_SECONDS = 60.0  # from the end of the drain until everything is closed
EXIT_SECONDS = 5.0  # from there on; threads that still hang are left behind
_log = logging.getLogger(__name__)


def end_within(seconds: float, code: int) -> None:
    """Exits with `code` if the process still runs after `seconds`."""
    timer = threading.Timer(seconds, _end, (code,))
    timer.daemon = True
    timer.name = "last resort"
    timer.start()


def _end(code: int) -> None:
    main, own = threading.main_thread(), threading.current_thread()
    names = sorted(t.name for t in threading.enumerate() if t not in (main, own) and not t.daemon)
    _log.warning("what still runs is left behind: %s", ", ".join(names) or "the main thread")
    flush_log()
    os._exit(code)
