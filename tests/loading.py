"""Adapters' weights without the rest of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint.content import read_content
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import parse_checked
from lora_serve.adapters.stores.blobs import Blobs, StoredBlobs, fetch_timed
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.figures import LoadTimes
from lora_serve.core.model_spec import ModelSpec


def load_adapter(folder: Path, adapter: AdapterRef, spec: ModelSpec) -> SavedAdapter:
    """From a folder that holds what `adapter` names."""
    return parse_checked(read_content(folder, adapter.digest), adapter, spec)


def fetch_adapter(store: Any, spec: ModelSpec, adapter: AdapterRef) -> SavedAdapter:
    """From a store."""
    return fetch_saved(StoredBlobs(store, store), spec, adapter)[0]


def fetch_saved(blobs: Blobs, spec: ModelSpec, adapter: AdapterRef) -> tuple[SavedAdapter, LoadTimes]:
    """As a loader does, with the time that each part took."""
    return fetch_timed(blobs, adapter.digest, lambda content: parse_checked(content, adapter, spec))
