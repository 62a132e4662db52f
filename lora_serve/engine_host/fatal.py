"""In the engine's process no part outlives another: where one ends by a bug, so does the process.

Half an engine would answer nobody, and the server would learn of it from its watchdog only, minutes later.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_serve.logs.handler import flush_log

FAILED = 1  # exit code
_log = logging.getLogger(__name__)


@contextmanager
def fatal(name: str) -> Iterator[None]:
    """Whatever is raised in the block ends the process at once, after a word in the log."""
    try:
        yield
    except BaseException:
        _log.critical("the engine's process ends: %s failed", name, exc_info=True)
        flush_log()
        os._exit(FAILED)


def run_fatally(name: str, work: Callable[[], None]) -> Callable[[], None]:
    """`work` for a thread."""

    def run() -> None:
        with fatal(name):
            work()

    return run
