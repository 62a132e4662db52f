"""What one cold load costs, by phase: from the adapter's own files and from its prepared file."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import SlotRef
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.figures import LoadTimes
from lora_serve.core.settings import Settings
from lora_serve.model.adapter_reader import AdapterReader
from lora_serve.model.build import build_model

ROUNDS = 15
PHASES = ("fetch", "verify", "parse", "fold", "copy", "total", "processor")


def load_split(model: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Medians in ms; "processor": time that the loading thread itself computed."""
    settings = Settings(model=str(model))
    parts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), settings.part(AdapterConfig).max_loras)
    artifact = read_artifact(folder, parts.spec)
    ref = AdapterRef("default", "bench/cold", 1, artifact.digest, 0, 0)
    with tempfile.TemporaryDirectory() as scratch:
        disk = DiskStore(Path(scratch))
        disk.put(ref.digest, folder)
        source = AdapterReader(StoredBlobs(disk, disk), parts)

        def once(generation: int) -> dict[str, float]:
            start, computed = time.perf_counter(), time.thread_time()
            loaded = source.load(ref)
            total, computed = time.perf_counter() - start, time.thread_time() - computed
            start = time.perf_counter()
            parts.runner.load_slot(SlotRef(0, generation, ref.digest), loaded.value)
            return _phases(loaded.times, time.perf_counter() - start, total, computed)

        own = [once(generation) for generation in range(ROUNDS)]
        source.keep(ref, source.load(ref).value)
        prepared = [once(generation) for generation in range(ROUNDS)]
    return {"own files": _medians(own), "prepared": _medians(prepared)}


def _phases(times: LoadTimes, copy: float, total: float, computed: float) -> dict[str, float]:
    seconds = (times.fetch, times.verify, times.parse, times.fold, copy, total, computed)
    return dict(zip(PHASES, seconds, strict=True))


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {phase: round(1000 * statistics.median(found[phase] for found in rounds), 3) for phase in PHASES}
