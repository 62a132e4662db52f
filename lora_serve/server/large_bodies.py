"""The large JSON bodies of requests: how much memory they take together, and how many are parsed at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_serve.core.errors import CapacityError

MAX_SMALL = 2**16  # bytes of a body that is none of them: it is parsed on the event loop, and always has room
MAX_BYTES = 2**30  # of all that are being read, wait to be parsed or are parsed
MAX_OF_TENANT = MAX_BYTES // 2  # so that no tenant takes the room of others
MAX_PARSED = 2  # at the same time, so that they leave threads and processor to others


class LargeBodies:
    """Used on the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_of_tenant: int = MAX_OF_TENANT) -> None:
        self.parsing = asyncio.Semaphore(MAX_PARSED)
        self._max_bytes, self._max_of_tenant = max_bytes, max_of_tenant
        self._held = Counter[str]()  # bytes by tenant

    @property
    def num_bytes(self) -> int:
        """The bytes that all of them hold."""
        return self._held.total()

    @contextmanager
    def room(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Room for one large body, until the block ends. The function is told how many bytes of it there are so far; it
        raises CapacityError if they have no room beside other bodies. A body by itself always has.
        """
        size = 0

        def grow(num_bytes: int) -> None:
            nonlocal size
            if num_bytes > size:
                self._check(self.num_bytes - size, num_bytes, self._max_bytes)
                self._check(self._held[tenant] - size, num_bytes, self._max_of_tenant)
                self._held[tenant] += num_bytes - size
                size = num_bytes

        try:
            yield grow
        finally:
            self._held[tenant] -= size
            if not self._held[tenant]:
                del self._held[tenant]

    def _check(self, others: int, num_bytes: int, most: int) -> None:
        if others and others + num_bytes > most:
            raise CapacityError("The large request bodies under way fill the memory that there is for them; try again.")
