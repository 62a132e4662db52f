"""From a store to tensors in host memory: what a loader's thread does first."""

from __future__ import annotations

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import load_adapter
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.model_spec import ModelSpec


def fetch_adapter(store: AdapterStore, spec: ModelSpec, adapter: AdapterRef) -> SavedAdapter:
    """The adapter's weights, checked. Raises AdapterUnavailableError, InvalidAdapterError, OSError."""
    with store.open(adapter.digest) as folder:
        return load_adapter(folder, adapter, spec)
