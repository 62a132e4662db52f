"""The table of the blobs on the local disk: sizes, order of use, and which are being read.

Tenants' floors do not apply here, unlike in the tiers above: two tenants may share a blob, and a store knows digests
only. An evicted blob is fetched again from the far store without delaying a step.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from lora_serve.adapters.eviction import create_policy
from lora_serve.adapters.eviction.residents import Residents
from lora_serve.adapters.stores.base import TierCounts
from lora_serve.core.figures import EvictionReason, TierStats

_OWNER = ""


class BlobTable:
    """Safe to call from several threads."""

    def __init__(
        self,
        scan: Callable[[], Iterable[tuple[str, int]]],
        evict: Callable[[str], None],
        max_bytes: int | None,
        is_cache: bool,
        policy: str,
    ) -> None:
        """`scan`: lists digests with bytes, least recently used first; called at the first use, so after the sweep.

        `evict`: removes a blob, under the table's lock. `is_cache`: blobs may be evicted to make room. `policy`: a file
        in adapters/eviction.
        """
        self._scan = scan
        self._evict = evict
        self._max_bytes = max_bytes
        self._is_cache = is_cache
        self._policy = policy
        self._lock = threading.RLock()
        self._held: Counter[str] = Counter()
        self._counts = TierCounts()
        self._scanned: Residents | None = None

    @contextmanager
    def holding(self, digest: str) -> Iterator[None]:
        """The blob, which need not be here yet, is not evicted meanwhile."""
        with self._lock:
            self._held[digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[digest] -= 1
                if not self._held[digest]:
                    del self._held[digest]

    def admit(self, digest: str, num_bytes: int, load_seconds: float) -> bool:
        """Make room for a blob and count it; returns False, and evicts nothing, if there is none. Raises OSError."""
        with self._lock:
            if digest in self._residents:
                return True
            victims = self._residents.victims(_OWNER, num_bytes, self._reluctance)
            if victims is None and not self._is_cache:
                self._scanned = None  # another process may have removed blobs
                victims = self._residents.victims(_OWNER, num_bytes, self._reluctance)
            if victims is None:
                return False
            self._push_out(self._residents, victims, EvictionReason.CAPACITY)
            self._residents.add(digest, _OWNER, num_bytes, load_seconds)
            return True

    def grow(self, digest: str, num_bytes: int) -> bool:
        """Make room for more bytes of a held blob; returns False, and evicts nothing, if there is none."""
        with self._lock:
            if digest not in self._residents:
                return True  # it was removed meanwhile: the write will fail
            victims = self._residents.victims(_OWNER, num_bytes, self._reluctance)
            if victims is None:
                return False
            self._push_out(self._residents, victims, EvictionReason.CAPACITY)
            self._residents.grow(digest, num_bytes)
            return True

    def looked_up(self, digest: str, is_found: bool) -> None:
        """Count a lookup, which is a use if the blob was found."""
        with self._lock:
            self._counts.hits += is_found
            self._counts.misses += not is_found
            if is_found and digest in self._residents:
                self._residents.use(digest)

    def arrived(self, seconds: float) -> None:
        """Count a blob that was fetched and written in `seconds`."""
        with self._lock:
            self._counts.loaded(seconds)

    def left(self, digest: str, reason: EvictionReason | None) -> None:
        """Note that a blob is gone; `reason` None: its writing failed."""
        with self._lock:
            if self._scanned is not None and digest in self._scanned:
                self._scanned.remove(digest)
            if reason is not None:
                self._counts.evictions[reason] += 1

    def stats(self) -> TierStats:
        with self._lock:
            return self._counts.frozen(len(self._residents), self._residents.num_bytes, self._max_bytes)

    @property
    def _residents(self) -> Residents:
        if self._scanned is None:
            found = Residents(create_policy(self._policy), self._max_bytes)
            for digest, num_bytes in self._scan():
                found.add(digest, _OWNER, num_bytes)
            self._push_out(found, found.surplus(self._reluctance), EvictionReason.SHRUNK)
            self._scanned = found  # at last: half a table would not keep the budget
        return self._scanned

    def _reluctance(self, digest: str) -> int | None:
        return 0 if self._is_cache and not self._held[digest] else None

    def _push_out(self, residents: Residents, digests: Iterable[str], reason: EvictionReason) -> None:
        for digest in digests:
            self._evict(digest)
            residents.remove(digest, for_room=True)
            self._counts.evictions[reason] += 1
