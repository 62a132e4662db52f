"""Hot adapters over a restart: which were on the device and in host memory is kept in STORE/hot.json."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.regular_file import open_regular
from lora_serve.adapters.stores.files import FILE_MODE, flush
from lora_serve.client.base import EngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import LoraServeError
from lora_serve.core.messages import Prefetch
from lora_serve.core.stats import AdapterCounters, EngineStats

FILE_NAME = "hot.json"
NOTE_SECONDS = 60.0  # between two looks at what is hot
LOOK_SECONDS = 5.0  # for an engine to answer; one that hangs must not hold up the shutdown
DEVICE_SECONDS = 30.0  # at most that /ready waits for the device's adapters
_MAX_FILE_BYTES = 16 * 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmSet:
    """Digests, the most asked for first."""

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()  # in host memory only

    @classmethod
    def of(cls, stats: EngineStats, known: Set[str]) -> WarmSet:
        """The adapters that the engine holds now and the catalog still knows."""

        def num_uses(digest: str) -> int:
            counters = stats.adapters.get(digest, AdapterCounters())
            return sum((*counters.hits.values(), *counters.misses.values()))

        device = {slot.digest for slot in stats.slots} & known
        host = set(stats.host_digests) & known - device
        device_first, host_first = (sorted(group, key=lambda d: (-num_uses(d), d)) for group in (device, host))
        return cls(tuple(device_first), tuple(host_first))


def read_warm_set(path: Path) -> WarmSet:
    """Reads the file of the last run; empty if there is none, or, with a line in the log, if it cannot be parsed."""
    try:
        with open_regular(path.parent.resolve() / path.name) as file:
            return _parsed(json.loads(file.read(_MAX_FILE_BYTES)))
    except FileNotFoundError:
        return WarmSet()
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        _log.warning("%s is ignored, as it cannot be read: %r", path.name, error)
        return WarmSet()


def write_warm_set(path: Path, warm_set: WarmSet) -> None:
    """Replaces the file atomically. Raises OSError."""
    tiers = (("device", warm_set.device), ("host", warm_set.host))
    adapters = [{"digest": digest, "tier": tier} for tier, digests in tiers for digest in digests]
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps({"adapters": adapters}, indent=1))
    temporary.chmod(FILE_MODE)
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


class WarmSetKeeper:
    """Loads the adapters that were hot in the last run, and writes down those that are hot in this one."""

    def __init__(self, client: EngineClient, catalog: Catalog, config: AdapterConfig) -> None:
        self._path = config.store / FILE_NAME
        self._client = client
        self._catalog = catalog
        self._config = config
        self._noted = read_warm_set(self._path)
        self._is_warm = False  # until then the set is still the last run's

    async def warm_device(self) -> None:
        """Loads the device's adapters beside the pinned ones; loads that take more than 30 s go on after the return."""
        refs = self._for_device(await self._num_engines())
        try:
            async with asyncio.timeout(DEVICE_SECONDS):
                await asyncio.gather(*(self._warm(ref, "device") for ref in refs))
        except TimeoutError:
            _log.warning("not all of the %d hot adapters are on the device yet", len(refs))

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Loads host memory's adapters, then writes the file every minute, when one of its adapters is deleted, and at
        the end.
        """
        is_over = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._keep(is_over), name="warm set")
        try:
            yield
        finally:
            is_over.set()
            if not self._is_warm:  # once it is, it may be writing, and is waited for
                task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, Exception):
                _log.error("hot adapters were no longer noted", exc_info=outcome)

    async def _keep(self, is_over: asyncio.Event) -> None:
        for ref in self._for_host(await self._num_engines()):
            await self._warm(ref, "host")  # one after the other: the other loader threads are the callers'
        self._is_warm = True
        loop, is_stale = asyncio.get_running_loop(), asyncio.Event()

        def check() -> None:
            if not {*self._noted.device, *self._noted.host} <= self._catalog.snapshot.digests:
                is_stale.set()

        changed = functools.partial(loop.call_soon_threadsafe, check)
        self._catalog.ledger.listen(changed)
        check()
        try:
            while not is_over.is_set():
                await _first_of(is_over, is_stale)
                is_stale.clear()
                await self._note()
        finally:
            self._catalog.ledger.unlisten(changed)

    async def _note(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                stats = await self._client.stats()
            warm_set = WarmSet.of(stats, self._catalog.snapshot.digests)
            if warm_set != self._noted:
                await asyncio.to_thread(write_warm_set, self._path, warm_set)
                self._noted = warm_set
        except (OSError, LoraServeError) as error:  # a TimeoutError is an OSError
            _log.warning("hot adapters could not be noted in %s: %r", self._path.name, error)

    async def _num_engines(self) -> int:
        """A fleet's replicas hold adapters of their own beside the pinned ones, which are on all of them."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return max(1, len((await self._client.stats()).replicas or ()))
        except (TimeoutError, LoraServeError):
            return 1

    def _for_device(self, num_engines: int) -> list[AdapterRef]:
        pinned, refs = self._pinned(), self._unpinned(self._noted.device)
        max_bytes = self._config.adapter_memory
        left = None if max_bytes is None else num_engines * (max_bytes - sum(ref.num_bytes for ref in pinned))
        return _fitting(refs, num_engines * (self._config.max_loras - len(pinned)), left)

    def _for_host(self, num_engines: int) -> list[AdapterRef]:
        """Those that fit into host memory beside the device's adapters, which were loaded through it; first those for
        which there is no slot now: fewer slots, or replicas that are still to come.
        """
        first, max_items = self._for_device(num_engines), self._config.max_cpu_loras
        refs = self._unpinned(self._noted.device) + self._known(self._noted.host)
        most = None if max_items is None else num_engines * max_items
        return _fitting(refs, most, num_engines * self._config.adapter_host_memory)[len(first) :]

    def _pinned(self) -> list[AdapterRef]:
        return [entry.ref() for entry in self._catalog.snapshot.entries.values() if entry.pinned]

    def _unpinned(self, digests: Iterable[str]) -> list[AdapterRef]:
        pinned = self._pinned()
        return [ref for ref in self._known(digests) if ref not in pinned]

    def _known(self, digests: Iterable[str]) -> list[AdapterRef]:
        """References of the digests that the catalog still has."""
        entries = self._catalog.snapshot.entries.values()
        refs = {version.digest: entry.ref(version) for entry in entries for version in entry.versions}
        return [refs[digest] for digest in digests if digest in refs]

    async def _warm(self, ref: AdapterRef, tier: Literal["device", "host"]) -> None:
        try:
            await self._client.adapters(Prefetch(ref, to=tier))
        except LoraServeError as error:
            _log.warning("the hot adapter %s cannot be loaded: %s", ref.label, error)


async def _first_of(*events: asyncio.Event) -> None:
    """Returns once one of the events is set, or after NOTE_SECONDS."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=NOTE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _fitting(refs: list[AdapterRef], max_items: int | None, max_bytes: int | None) -> list[AdapterRef]:
    """The first of them that are within both limits (None: no limit) together."""
    fitting: list[AdapterRef] = []
    num_bytes = 0
    for ref in refs:
        num_bytes += ref.num_bytes
        is_full = max_items is not None and len(fitting) >= max_items
        if is_full or (max_bytes is not None and num_bytes > max_bytes):
            break
        fitting.append(ref)
    return fitting


def _parsed(value: Any) -> WarmSet:
    """Raises TypeError, LookupError or ValueError for what `write_warm_set` has not written."""
    tiers: dict[str, list[str]] = {"device": [], "host": []}
    for item in value["adapters"]:
        if not isinstance(item["digest"], str):
            raise TypeError("a digest is no text")
        tiers[item["tier"]].append(item["digest"])
    return WarmSet(tuple(dict.fromkeys(tiers["device"])), tuple(dict.fromkeys(tiers["host"])))
