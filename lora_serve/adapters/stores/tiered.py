"""A near store in front of a far one: read-through with verification, write-through.

Digests are checked whenever bytes are read from a tier: a broken near copy is set aside and fetched again, a broken far
copy is removed, so that every replica reports it and the same content can be registered again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.checkpoint.content import adapter_digest, check_sizes
from lora_serve.adapters.regular_file import UnsoundFileError
from lora_serve.adapters.stores.base import AdapterStore, Records, TierCounts
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.figures import EvictionReason, TierStats

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifiedBlob:
    """A folder whose content matches its digest."""

    folder: Path
    tier: str  # where the bytes came from
    fetch: float  # seconds to bring them onto this machine
    verify: float  # seconds to check the digest


class TieredStore:
    """See AdapterStore, StoreFigures. Intact near copies are served even while the far store is away."""

    def __init__(self, near: DiskStore, far: AdapterStore, far_name: str = "redis") -> None:
        """`near` is a cache; blobs that do not fit there are served from `far`. `far_name`: for the figures."""
        self.near = near
        self.far = far
        self._far_name = far_name
        self._lock = threading.Lock()  # guards the far tier's figures
        self._counts = TierCounts()

    def put(self, digest: str, folder: Path) -> None:
        """Returns when the far store has the blob, and the near one if there is room."""
        with self.near.holding(digest):
            self.near.keep(digest, folder)
            started = time.perf_counter()
            self.far.put(digest, folder)
            with self._lock:
                self._counts.loaded(time.perf_counter() - started)

    @contextmanager
    def open(self, digest: str) -> Iterator[Path]:
        """Fetches a missing or broken near copy again; the folder is verified."""
        with self.opened(digest) as blob:
            yield blob.folder

    @contextmanager
    def opened(self, digest: str) -> Iterator[VerifiedBlob]:
        """`open` that also tells the tier of the bytes and the times."""
        started = time.perf_counter()
        with self.near.holding(digest):
            near = self.near.sound_copy(digest)
            looked = time.perf_counter() - started
            if near is not None:
                yield VerifiedBlob(near, "disk", fetch=0.0, verify=looked)
                return
            with self._sound_far_copy(digest) as far:
                near = self._keep_near(digest, far.folder, far.fetch + far.verify)
                if near is None:
                    yield far
                    return
            yield VerifiedBlob(near, far.tier, far.fetch, far.verify)

    def has(self, digest: str) -> bool:
        return self.near.has(digest) or self.far.has(digest)

    def delete(self, digest: str) -> None:
        """Far first: if that fails, the near copy is still listed and can be deleted again."""
        self.far.delete(digest)
        self.near.delete(digest)

    def digests(self) -> frozenset[str]:
        return self.near.digests() | self.far.digests()

    def release(self, digest: str) -> None:
        self.near.delete(digest)

    def records(self, digests: Collection[str]) -> dict[str, dict[str, str]]:
        """The far store's records; where it has none, the near one's."""
        near, far = self.near.records(digests), self.far.records(digests)
        return {digest: far.get(digest) or near.get(digest, {}) for digest in far.keys() | near.keys()}

    @contextmanager
    def staging(self, records: Mapping[str, Records]) -> Iterator[Callable[[], None]]:
        """The far records count; near ones that cannot be written follow at the next start."""
        with ExitStack() as stack:
            far = stack.enter_context(self.far.staging(records))
            try:
                near = stack.enter_context(self.near.staging(records))
            except AdapterUnavailableError as error:
                _log.warning("records are not kept near: %s", error)
                near = _no_records

            def publish() -> None:
                far()
                near()

            yield publish

    def remove_record(self, digest: str, key: str, tombstone: bool) -> None:
        try:
            self.far.remove_record(digest, key, tombstone)
        finally:
            self.near.remove_record(digest, key, tombstone)

    def replenish(self, digests: Set[str]) -> None:
        """Restore the blobs that the far store has lost and the near one still has."""
        for digest in digests & self.near.digests():
            if not self.far.has(digest):
                with self.near.holding(digest):
                    folder = self.near.sound_copy(digest)
                    if folder is not None:
                        self.far.put(digest, folder)

    def tiers(self) -> dict[str, TierStats]:
        """The size of the far store is left out: it would cost a round trip."""
        with self._lock:
            far = self._counts.frozen(None, None, None)
        return {**self.near.tiers(), self._far_name: far}

    def places_of(self, digest: str) -> tuple[str, ...]:
        """Every registered adapter is in the far store."""
        return (self._far_name, *self.near.places_of(digest))

    def _keep_near(self, digest: str, far: Path, seconds: float) -> Path | None:
        """The near copy; None if there is no room, or the disk cannot be written."""
        try:
            return self.near.keep(digest, far, seconds, self.far.records([digest]).get(digest))
        except AdapterUnavailableError as error:
            _log.warning("%s is not kept near: %s", digest, error)
            return None

    @contextmanager
    def _sound_far_copy(self, digest: str) -> Iterator[VerifiedBlob]:
        """The verified far copy. It is removed if two reads agree on wrong bytes; one read may be this machine's fault.

        Raises AdapterUnavailableError.
        """
        found: set[str | None] = set()
        for _ in range(2):
            started = time.perf_counter()
            with self._far_copy(digest) as folder:
                fetched = time.perf_counter()
                content = _digest_of(folder)
                if content == digest:
                    yield VerifiedBlob(folder, self._far_name, fetched - started, time.perf_counter() - fetched)
                    return
                found.add(content)
        if len(found) == 1:
            self._condemn(digest)
        raise AdapterUnavailableError(
            f"The far adapter store's copy of {digest} is corrupt and was not used; register the adapter again."
        )

    @contextmanager
    def _far_copy(self, digest: str) -> Iterator[Path]:
        is_found = False
        try:
            with self.far.open(digest) as folder:
                is_found = True
                yield folder
        finally:
            with self._lock:
                self._counts.hits += is_found
                self._counts.misses += not is_found

    def _condemn(self, digest: str) -> None:
        _log.error("the far store's copy of %s is corrupt; it is taken out", digest)
        records = self.far.records([digest])  # other ids may name the same content
        self.far.delete(digest)
        with self.far.staging(records) as publish:
            publish()
        with self._lock:
            self._counts.evictions[EvictionReason.CORRUPT] += 1


def _no_records() -> None:
    pass


def _digest_of(folder: Path) -> str | None:
    """The digest; None if a file can be no adapter's. Raises AdapterUnavailableError if this machine cannot read it."""
    try:
        check_sizes(folder)
        return adapter_digest(folder)
    except UnsoundFileError:
        return None
    except OSError as error:
        _log.warning("what was fetched of the far store cannot be read here: %r", error)
        raise AdapterUnavailableError("The adapter's files cannot be read here at present.") from None
