"""Threads that work waits for where the machine has no memory for one more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class PatientThreads(ThreadPoolExecutor):
    """See ThreadPoolExecutor, which refuses work whenever it cannot start a thread; this one only while it has none."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise
