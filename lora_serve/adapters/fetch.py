"""From a store to tensors in host memory: what a loader's thread does first."""

from __future__ import annotations

import time

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import check_digest, read_checked
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.load_times import LoadTimes
from lora_serve.core.model_spec import ModelSpec


def fetch_adapter(store: AdapterStore, spec: ModelSpec, adapter: AdapterRef) -> SavedAdapter:
    """The adapter's weights, checked. Raises AdapterUnavailableError, InvalidAdapterError, OSError."""
    return fetch_timed(store, spec, adapter)[0]


def fetch_timed(store: AdapterStore, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    """`fetch_adapter`, and where its time went."""
    start = time.perf_counter()
    tier, near = _brought_near(store, adapter.digest)
    with near.open(adapter.digest) as folder:
        opened = time.perf_counter()
        check_digest(folder, adapter, spec)
        verified = time.perf_counter()
        saved = read_checked(folder, adapter, spec)
    return saved, LoadTimes(tier, opened - start, verified - opened, time.perf_counter() - verified)


def _brought_near(store: AdapterStore, digest: str) -> tuple[str, AdapterStore]:
    """The tier that the bytes come from, and the store on this machine that has them now."""
    if isinstance(store, TieredStore):
        return store.bring_near(digest), store.near
    return "disk", store
