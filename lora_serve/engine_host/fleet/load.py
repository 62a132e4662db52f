"""Loads the engine of a replica. Imported in its actor alone: torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lora_serve.core.messages import BlobMessage, Configure
from lora_serve.engine_host.fleet.blobs import scratch_prefix
from lora_serve.engine_host.remote_blobs import RemoteBlobs
from lora_serve.logs import configure_logging, timed
from lora_serve.model.loading.transformers_import import import_transformers
from lora_serve.model.system.threads import use_one_core

if TYPE_CHECKING:
    from lora_serve.engine_host.local import LocalEngine


def load_engine(
    configure: Configure, replica: str, send: Callable[[Sequence[BlobMessage]], None]
) -> tuple[LocalEngine, RemoteBlobs]:
    """The engine, and where answers to what its loaders `send` go. Raises ModelError, ConfigError."""
    import_transformers(configure.model.quantization, configure.model.model)
    configure_logging("json")  # the server takes the lines apart (output.py)
    from lora_serve.engine_host.local import LocalEngine, build_parts
    from lora_serve.text.tokenizer import TextModel

    use_one_core()
    with timed(f"model {configure.model.model}"):
        parts = build_parts(configure.model, configure.engine, configure.adapters)
    gc.freeze()
    blobs = RemoteBlobs(send, configure.adapters.store / "tmp", scratch_prefix(replica))
    engine = LocalEngine(parts, configure.engine, configure.adapters, blobs, lambda: TextModel.load(parts.spec.name))
    return engine, blobs
