"""A thread that brings in what other replicas wrote into the shared registry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.core.errors import AdapterUnavailableError

_LONGEST_WAIT = 1.0  # seconds without news, after which the registry is asked whether it is still what it was
_PAUSE = 0.25  # seconds between two tries while the registry is away
_log = logging.getLogger(__name__)


class Follower:
    """Keeps a shared catalog's snapshot at most a moment old, until `close`."""

    def __init__(self, catalog: Catalog, returned: Callable[[], None]) -> None:
        """`returned` is called on this thread once at first, and when the registry was away or has lost something."""
        self._catalog = catalog
        self._returned = returned
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="catalog-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it waits for takes a few seconds at most."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        is_away, num_reloads = False, -1
        while not self._stopping.is_set():
            was_away, is_away = is_away, not self._follow()
            if is_away != was_away:
                _log.warning(
                    "the shared adapter registry %s", "is away; what is known here is served" if is_away else "is back"
                )
            if is_away:
                self._stopping.wait(_PAUSE)
            elif num_reloads != self._catalog.num_reloads:
                num_reloads = self._catalog.num_reloads
                self._returned()

    def _follow(self) -> bool:
        """Wait for news and bring it in; False if the registry is away."""
        try:
            if not self._catalog.is_away:
                with suppress(AdapterUnavailableError):  # the refresh will tell, and note it
                    self._catalog.wait(_LONGEST_WAIT)
            self._catalog.refresh()
        except AdapterUnavailableError:
            return False
        except Exception:
            _log.exception("the follower met a bug and goes on")
            return False
        return True
