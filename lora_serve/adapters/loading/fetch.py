"""From a store to tensors in host memory: what a loader's thread does first."""

from __future__ import annotations

import time

from lora_serve.adapters.checkpoint.content import read_content
from lora_serve.adapters.checkpoint.weights.reading import parse_checked
from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter
from lora_serve.adapters.loading.blobs import Blobs
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.stats import LoadTimes


def fetch_timed(blobs: Blobs, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    """The adapter's weights, checked, and where the time went.

    What is on this machine is hashed here alone, as it is read. If that is missing or wrong, the store is asked to
    look, which mends what can be mended; what it gives is hashed again, as files may change between two looks.
    Raises AdapterUnavailableError, InvalidAdapterError, OSError.
    """
    start = time.perf_counter()
    try:
        with blobs.near(adapter.digest) as folder:
            return _read(VerifiedBlob(folder, "disk", time.perf_counter() - start, 0.0), spec, adapter)
    except (AdapterUnavailableError, OSError):  # the other way finds out what is wrong
        pass
    with blobs.verified(adapter.digest) as blob:
        return _read(blob, spec, adapter)


def _read(blob: VerifiedBlob, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    start = time.perf_counter()
    content = read_content(blob.folder, adapter.digest)
    checked = time.perf_counter()
    saved = parse_checked(content, adapter, spec)
    return saved, LoadTimes(blob.tier, blob.fetch, blob.verify + checked - start, time.perf_counter() - checked)
