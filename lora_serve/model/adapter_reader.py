"""Reads an adapter into host memory on a loader thread: the file prepared for this base, or the adapter's own."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.checkpoint.content import DUMMY_DIGEST
from lora_serve.adapters.checkpoint.saved import dummy_adapter
from lora_serve.adapters.checkpoint.weights import parse_checked
from lora_serve.adapters.regular_file import ChangedFileError, NotRegularError
from lora_serve.adapters.stores.blobs import Blobs, fetch_timed
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.figures import Loaded, LoadTimes
from lora_serve.model.build import ModelParts
from lora_serve.model.lora import host_adapter
from lora_serve.model.lora.host_adapter import HostAdapter

_log = logging.getLogger(__name__)


class AdapterReader:
    """Reads adapters: the prepared file on this machine's disk if there is a sound one, else the adapter's own files.

    Every byte is checked against a digest after it was read. Used by several threads at once.
    """

    def __init__(
        self,
        blobs: Blobs,
        parts: ModelParts,
        last_folded: Callable[[AdapterRef], HostAdapter | None] = lambda adapter: None,
    ) -> None:
        """Prepared files lie in the blobs' folders on this machine. `last_folded`: gives an adapter that was read,
        checked and folded just now.
        """
        self._last_folded = last_folded
        self._blobs = blobs
        self._parts = parts
        self._base = host_adapter.PreparedBase.of(parts.spec)
        self._pin = parts.spec.device.startswith("cuda")

    def load(self, adapter: AdapterRef) -> Loaded[HostAdapter]:
        """Reads one adapter. Raises AdapterUnavailableError, InvalidAdapterError, OSError."""
        loaded = self._load(adapter)
        return dataclasses.replace(loaded, extra_bytes=loaded.value.extra_bytes)

    def _load(self, adapter: AdapterRef) -> Loaded[HostAdapter]:
        if adapter.digest == DUMMY_DIGEST:
            return Loaded(self._parts.fold(dummy_adapter(self._parts.spec)), LoadTimes("none"))
        if (value := self._last_folded(adapter)) is not None:
            return Loaded(value, LoadTimes("none"))
        return self._prepared(adapter) or self._ordinary(adapter)

    def keep(self, adapter: AdapterRef, value: HostAdapter) -> None:
        """Writes the prepared file for the next load, unless it is there or the adapter is of a kind that has none."""
        if adapter.digest == DUMMY_DIGEST or not value.is_plain:
            return
        name = host_adapter.file_name(adapter, self._base)
        try:
            with self._blobs.near(adapter.digest) as blob:
                if not (blob / name).exists():
                    self._blobs.keep_beside(adapter.digest, name, host_adapter.pack(value, self._base))
        except AdapterUnavailableError:  # the adapter was deleted meanwhile
            return
        except (OSError, MemoryError) as error:
            _log.info("%s is not prepared for its next load: %r", adapter.label, error)

    def _prepared(self, adapter: AdapterRef) -> Loaded[HostAdapter] | None:
        try:
            with self._blobs.near(adapter.digest) as blob:
                return self._read_prepared(blob / host_adapter.file_name(adapter, self._base), adapter)
        except (AdapterUnavailableError, OSError):  # `_ordinary` says in words what is wrong
            return None

    def _read_prepared(self, path: Path, adapter: AdapterRef) -> Loaded[HostAdapter] | None:
        start = time.perf_counter()
        if adapter.traits.base not in ("", self._base.fingerprint) or not os.path.lexists(path):
            return None
        try:
            file = host_adapter.read(path, pin=self._pin)
            fetched = time.perf_counter()
            host_adapter.verify(file)
            verified = time.perf_counter()
            value = host_adapter.unpack(file, adapter, self._base)
        except (host_adapter.NotPreparedError, NotRegularError, ChangedFileError) as error:
            _log.warning("the prepared file of %s is removed: %s", adapter.label, error)
            with suppress(OSError):
                path.unlink()
            return None
        return Loaded(value, LoadTimes("disk", fetched - start, verified - fetched, time.perf_counter() - verified))

    def _ordinary(self, adapter: AdapterRef) -> Loaded[HostAdapter]:
        spec = self._parts.spec
        saved, times = fetch_timed(self._blobs, adapter.digest, lambda content: parse_checked(content, adapter, spec))
        start = time.perf_counter()
        value = self._parts.fold(saved)
        return Loaded(value, dataclasses.replace(times, fold=time.perf_counter() - start))
