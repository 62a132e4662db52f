"""A thread that brings in what other replicas wrote into a shared journal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lora_serve.adapters.catalog.ledger import Ledger
from lora_serve.core.errors import AdapterUnavailableError

_LONGEST_WAIT = 1.0  # seconds without news, after which the journal is read anyway
_PAUSE = 0.25  # seconds between two attempts
_log = logging.getLogger(__name__)


class Follower:
    """Keeps the state of a shared journal's ledger up to date until `close`."""

    def __init__(self, followed: Ledger[Any], returned: Callable[[], None], title: str = "adapter registry") -> None:
        """`returned` is called on this thread once at first, and whenever the journal is back or has lost records.

        If it raises anything, it is soon called again.
        """
        self._followed = followed
        self._returned = returned
        self._title = title
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{title} follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, within a few seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        problem, num_losses = None, -1
        while not self._stopping.is_set():
            is_away, told = not self._succeeds(self._follow), problem
            problem = self._followed.problem if is_away else None
            if problem != told:
                what = f"is away; what is known here is served: {problem}" if problem else "is back"
                _log.warning("the shared %s %s", self._title, what)
            newest = self._followed.num_losses
            if is_away or (num_losses != newest and not self._succeeds(self._returned)):
                self._stopping.wait(_PAUSE)
            else:
                num_losses = newest

    def _follow(self) -> None:
        """Waits for news and brings it in. Raises AdapterUnavailableError if the journal is away."""
        if not self._followed.is_away:
            with suppress(AdapterUnavailableError):  # the refresh fails likewise, and notes it
                self._followed.wait(_LONGEST_WAIT)
        self._followed.refresh()

    def _succeeds(self, act: Callable[[], None]) -> bool:
        """False if it raised anything, which ends no thread that nobody would miss."""
        try:
            act()
        except AdapterUnavailableError:
            return False
        except Exception:
            _log.exception("the follower met a bug and goes on")
            return False
        return True
