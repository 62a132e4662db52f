"""Adapters' weights without the rest of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_serve.adapters.blobs import StoredBlobs
from lora_serve.adapters.checkpoint.digest import check_digest
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import read_checked
from lora_serve.adapters.fetch import fetch_timed
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.model_spec import ModelSpec


def load_adapter(folder: Path, adapter: AdapterRef, spec: ModelSpec) -> SavedAdapter:
    """From a folder that holds what `adapter` names."""
    check_digest(folder, adapter.digest)
    return read_checked(folder, adapter, spec)


def fetch_adapter(store: Any, spec: ModelSpec, adapter: AdapterRef) -> SavedAdapter:
    """From a store."""
    return fetch_timed(StoredBlobs(store, store), spec, adapter)[0]
