"""Brings an adapter from a store into tensors in host memory: the first part of a load."""

from __future__ import annotations

import time

from lora_serve.adapters.checkpoint.content import read_content
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import parse_checked
from lora_serve.adapters.loading.blobs import Blobs
from lora_serve.adapters.stores.tiered import VerifiedBlob
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.tier_stats import LoadTimes


def fetch_timed(blobs: Blobs, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    """The adapter's weights, checked against its digest, and the time that each part took.

    A blob on this machine is hashed while it is read. If it is missing or broken, the store verifies its copies and
    repairs what it can; that blob is hashed again, as files may change in between.
    Raises AdapterUnavailableError, InvalidAdapterError, OSError.
    """
    start = time.perf_counter()
    try:
        with blobs.near(adapter.digest) as folder:
            return _read(VerifiedBlob(folder, "disk", time.perf_counter() - start, 0.0), spec, adapter)
    except (AdapterUnavailableError, OSError):  # the store finds out what is wrong
        pass
    with blobs.verified(adapter.digest) as blob:
        return _read(blob, spec, adapter)


def _read(blob: VerifiedBlob, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    start = time.perf_counter()
    content = read_content(blob.folder, adapter.digest)
    checked = time.perf_counter()
    saved = parse_checked(content, adapter, spec)
    return saved, LoadTimes(blob.tier, blob.fetch, blob.verify + checked - start, time.perf_counter() - checked)
