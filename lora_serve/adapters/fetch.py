"""From a store to tensors in host memory: what a loader's thread does first."""

from __future__ import annotations

import time

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import check_digest, read_checked
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.tiered import TieredStore, VerifiedBlob
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.load_times import LoadTimes
from lora_serve.core.model_spec import ModelSpec


def fetch_timed(store: AdapterStore, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    """The adapter's weights, checked, and where the time went.

    Raises AdapterUnavailableError, InvalidAdapterError, OSError.
    """
    if isinstance(store, TieredStore):
        with store.opened(adapter.digest) as blob:
            return _read(blob, adapter, spec)
    start = time.perf_counter()
    with store.open(adapter.digest) as folder:
        opened = time.perf_counter()
        check_digest(folder, adapter)
        verify = time.perf_counter() - opened
        return _read(VerifiedBlob(folder, "disk", opened - start, verify), adapter, spec)


def _read(blob: VerifiedBlob, adapter: AdapterRef, spec: ModelSpec) -> tuple[SavedAdapter, LoadTimes]:
    start = time.perf_counter()
    saved = read_checked(blob.folder, adapter, spec)
    return saved, LoadTimes(blob.tier, blob.fetch, blob.verify, time.perf_counter() - start)
