"""Loads adapters on threads of its own and posts what came of it. Touches no cache and no scheduler; no torch.

The in-flight set is the one state below the doors that two kinds of threads share, and so the one with a lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InternalError, LoraServeError

V = TypeVar("V")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadFinished(Generic[V]):
    """Exactly one of `adapter` and `error` is given."""

    digest: str
    adapter: V | None
    error: LoraServeError | None
    seconds: float  # of the fetch itself, not of waiting for a thread


class Loader(Generic[V]):
    """One load per digest, however many wait for it."""

    def __init__(
        self, fetch: Callable[[AdapterRef], V], post: Callable[[LoadFinished[V]], None], num_threads: int = 2
    ) -> None:
        """`fetch` and `post` are called on the loader's threads; `post` must be safe to call from any thread."""
        self._fetch = fetch
        self._post = post
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-loader")

    def submit(self, adapter: AdapterRef) -> None:
        """Start a load unless one of the same digest is under way. Returns at once."""
        with self._lock:
            if adapter.digest in self._in_flight:
                return
            self._in_flight.add(adapter.digest)
            self._threads.submit(self._run, adapter)

    def close(self) -> None:
        """Drop loads that have not begun, wait for those that have."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, adapter: AdapterRef) -> None:
        start = time.perf_counter()
        value, error = self._try(adapter)
        message = LoadFinished(adapter.digest, value, error, time.perf_counter() - start)
        with self._lock:  # before the post: whoever reads it may submit the same digest again at once
            self._in_flight.discard(adapter.digest)
        self._post(message)

    def _try(self, adapter: AdapterRef) -> tuple[V | None, LoraServeError | None]:
        try:
            return self._fetch(adapter), None
        except LoraServeError as error:
            return None, error
        except (OSError, MemoryError) as error:
            _log.warning("adapter %s could not be read: %r", adapter.label, error)
            return None, AdapterUnavailableError(f"The weights of {adapter.label} cannot be read at present.")
        except Exception:
            _log.exception("adapter %s failed to load", adapter.label)
            return None, InternalError(f"The weights of {adapter.label} could not be loaded.")
