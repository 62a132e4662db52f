"""GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy", HP Labs 1998): what is used often, is small and takes long to load stays.

    priority(key) = clock + frequency * cost / size       set at each use, with the clock of that moment

The entry of the lowest priority is evicted, and the clock rises to its priority. So an entry that is no longer used
ages however often it was used before: newcomers start from a later clock. `cost` is the seconds to load it again,
`size` its bytes, `frequency` its uses since it was added. Among equals the least recently used one is evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

_ASSUMED_BYTES_PER_SECOND = 2e8  # for an entry whose load was never measured
_Place = tuple[float, int, str]  # priority, number of the use, key


@dataclass(slots=True)
class _Entry:
    worth: float  # seconds per byte
    frequency: int
    place: _Place


class Policy:
    """See `EvictionPolicy`. A heap whose outdated places are skipped: O(log n) per use, O(n) copying per order."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._num_uses = 0
        self._entries: dict[str, _Entry] = {}
        self._heap: list[_Place] = []

    def add(self, key: str, num_bytes: int, load_seconds: float) -> None:
        assert key not in self._entries, "a key was added twice"
        cost = load_seconds or max(num_bytes, 1) / _ASSUMED_BYTES_PER_SECOND
        self._entries[key] = _Entry(cost / max(num_bytes, 1), 0, (0.0, 0, key))
        self.use(key)

    def use(self, key: str) -> None:
        entry = self._entries[key]
        self._num_uses += 1
        entry.frequency += 1
        entry.place = (self._clock + entry.frequency * entry.worth, self._num_uses, key)
        heapq.heappush(self._heap, entry.place)
        self._tidy()

    def remove(self, key: str) -> None:
        del self._entries[key]
        self._tidy()

    def evict(self, key: str) -> None:
        self._clock = max(self._clock, self._entries[key].place[0])
        self.remove(key)

    def order(self) -> Iterator[str]:
        heap = list(self._heap)
        while heap:
            place = heapq.heappop(heap)
            entry = self._entries.get(place[2])
            if entry is not None and entry.place == place:
                yield place[2]

    def _tidy(self) -> None:
        """Drops the outdated places once they are most of the heap."""
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry.place for entry in self._entries.values()]
            heapq.heapify(self._heap)
