"""`watching(house, canaries)`: whatever happens in the block, canaries are answered right and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.canary.asking import Canaries, Verdict
from tests.canary.figures import at_rest, settled
from tests.canary.house import KEY, House
from tests.canary.questions import MARKER


class Watch:
    """Rounds of questions on a thread of their own, one after the other, while the block runs."""

    def __init__(self, url: str, canaries: Canaries, may_refuse: bool, pause: float = 0.0) -> None:
        """`pause`: seconds between two rounds."""
        self.verdict = Verdict()
        self.secrets = [KEY, MARKER]  # must not be in the log; a test adds its own
        self.expected_in_log: list[str] = []  # an error or traceback that holds one of these is planned
        self._url = url
        self._canaries = canaries
        self._may_refuse = may_refuse
        self._pause = pause
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep_asking()), name="canaries")

    def __enter__(self) -> Watch:
        self._thread.start()
        self._has_begun.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    async def _keep_asking(self) -> None:
        """At least two rounds: one that begins before the block, one that begins after it."""
        is_over = False
        while not is_over:
            is_over = self._is_over.is_set()
            self._has_begun.set()
            await self._canaries.round(self._url, self.verdict, may_refuse=self._may_refuse and not is_over)
            await asyncio.to_thread(self._is_over.wait, self._pause)


@contextmanager
def watching(
    house: House, canaries: Canaries, *, may_refuse: bool = False, pause: float = 0.0, max_lag: float | None = None
) -> Iterator[Watch]:
    """`may_refuse`: canaries may be told to come back later while the block runs, as anybody under overload.

    `max_lag`: seconds that 99 of 100 calls of the event loop may be late; None: it is only told.
    """
    before, start, lag = at_rest(house), len(house.log), house.lag.mark()
    with Watch(house.url, canaries.with_keys(house.keys), may_refuse, pause) as watch:
        yield watch
    assert watch.verdict.faults == []
    assert watch.verdict.num_right >= len(canaries.questions)
    assert house.is_running
    assert settled(house, before) == {}
    during = house.lag.since(lag)
    print(f"event loop: {during}")
    assert max_lag is None or during.p99 <= max_lag, str(during)
    lines = house.log[start:]
    for secret in (*watch.secrets, *house.keys.values()):
        assert not [line for line in lines if secret in line]
    assert unplanned(lines, watch.expected_in_log) == []


def unplanned(lines: list[str], expected: list[str]) -> list[str]:
    """Errors and tracebacks that nobody announced."""
    bad = [line for line in lines if line.startswith(("ERROR", "CRITICAL")) or "Traceback" in line]
    return [line for line in bad if not any(text in line for text in expected)]
