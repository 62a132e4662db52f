"""The large JSON bodies of requests: how much memory they take together, and the processes that parse them."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lora_serve.core.errors import CapacityError
from lora_serve.core.process import PatientThreads, without_collections
from lora_serve.core.worker_processes import CLOSED, WorkerPool
from lora_serve.server.schemas.fields import TOKEN_ID_NAMES, known_names

T = TypeVar("T")
MAX_BYTES = 2**30  # of all that are being read, wait to be parsed or are parsed
MAX_OF_TENANT = MAX_BYTES // 2  # so that no tenant takes the memory of others
MAX_PARSED = 2  # at the same time, so that they leave threads and processor to others


class LargeBodies:
    """Used on the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_of_tenant: int = MAX_OF_TENANT) -> None:
        self._threads = PatientThreads(MAX_PARSED, "large-bodies")
        self._max_bytes, self._max_of_tenant = max_bytes, max_of_tenant
        self._held = Counter[str]()  # bytes by tenant

    @property
    def num_bytes(self) -> int:
        """The bytes that all of them hold."""
        return self._held.total()

    @contextmanager
    def memory_for(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Memory for one large body, until the block ends. The function takes the bytes of it that there are so far; it
        raises CapacityError if there is no memory for them beside other bodies. A body by itself always has some.
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

    async def parse(self, raw: bytes, read: Callable[[bytes], T]) -> T:
        """The fields of a body that some route knows, as `read` finds them in a worker's answer. Raises CapacityError,
        and what `read` does.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._parse, raw, read)

    def close(self) -> None:
        """End the processes; what is being parsed ends by itself."""
        if "_workers" in vars(self):  # made by the first body that asks for them: all schemas are imported then
            self._workers.close()
        self._threads.shutdown(wait=False)

    @functools.cached_property
    def _workers(self) -> WorkerPool:
        names = (",".join(known_names()), ",".join(TOKEN_ID_NAMES))
        return WorkerPool("lora_serve.server.json_parsing", *names, num_processes=MAX_PARSED)

    def _parse(self, raw: bytes, read: Callable[[bytes], T]) -> T:
        try:
            with self._workers.worker() as worker:
                answer = worker.ask(raw)
        except CLOSED as error:
            raise CapacityError(
                "There is no memory, or no process, to parse a large request body; try again."
            ) from error
        with without_collections():
            return read(answer)

    def _check(self, others: int, num_bytes: int, most: int) -> None:
        if others and others + num_bytes > most:
            raise CapacityError("The large request bodies under way fill the memory that there is for them; try again.")
