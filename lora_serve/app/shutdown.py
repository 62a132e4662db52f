"""The process ends in time, whatever hangs while it ends: a disk that is gone keeps a thread for ever."""

from __future__ import annotations

import logging
import os
import threading

from lora_serve.logs.handler import flush_log

ENDING_SECONDS = 60.0  # from the end of the drain until everything is closed
EXIT_SECONDS = 5.0  # from then on: threads that nobody could end are left behind
_log = logging.getLogger(__name__)


def end_within(seconds: float, code: int) -> None:
    """Exit with `code` after so many seconds, if the process is still there."""
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
