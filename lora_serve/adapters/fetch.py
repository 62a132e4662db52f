"""From a store to tensors in host memory: what a loader's thread does first."""

from __future__ import annotations

import time

from lora_serve.adapters.blobs import Blobs
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import read_checked
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.load_times import LoadTimes
from lora_serve.core.model_spec import ModelSpec


def fetch_timed(blobs: Blobs, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    """The adapter's weights, checked, and where the time went.

    Raises AdapterUnavailableError, InvalidAdapterError, OSError.
    """
    with blobs.verified(adapter.digest) as blob:
        start = time.perf_counter()
        saved = read_checked(blob.folder, adapter, spec)
        return saved, LoadTimes(blob.tier, blob.fetch, blob.verify, time.perf_counter() - start)
