"""What steps and loads of this machine cost, as a profile for the simulator.

    python -m benchmarks.record_steps [--model demo|135m] [--steps 400] [--out FILE.json]

The real engine in this process, no HTTP: prompts of 16 to 256 random tokens, 4 to 24 new tokens, at 1, 4 and 16 rows at
a time, without adapters, with one for all, and with all. Every adapter is loaded from a page cache that is warm, first
from its own files and then from its prepared file; the first counts as `remote`, the second as `disk`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import make_checkpoints
from benchmarks.report import machine
from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.weights import read_weights
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.commands.demo import DATA
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import StepLoad
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import build_engine
from lora_serve.engine.loader import LoadFinished
from lora_serve.model.adapter_reader import AdapterReader
from lora_serve.model.build import build_model
from lora_serve.simulate.profiles import LearnedSteps

MAX_ROWS = 16
MAX_MODEL_LEN = 512
WARM_STEPS = 5  # not recorded
Transfer = tuple[int, float]  # bytes, seconds


@dataclass(slots=True)
class Recording:
    """What was measured."""

    steps: list[tuple[StepLoad, float]]
    loads: dict[str, list[Transfer]]  # "remote", "disk", "copy"


class RecordedEngine:
    """Loads happen between two steps, on the calling thread, and are timed."""

    def __init__(self, model: Path, folders: Sequence[Path], scratch: Path, flags: dict[str, Any]) -> None:
        self.settings = Settings(model=str(model), max_loras=MAX_ROWS, max_num_seqs=MAX_ROWS, **flags)
        engine, adapters = self.settings.part(EngineConfig), self.settings.part(AdapterConfig)
        self.parts = build_model(self.settings.part(ModelConfig), engine, MAX_ROWS)
        self._loading: list[AdapterRef] = []
        self.engine = build_engine(
            self.parts.runner, self.parts.spec, self.parts.num_blocks, engine, adapters, self._loading.append
        )
        self.recording = Recording([], {"remote": [], "disk": [], "copy": []})
        self.engine.scheduler.batcher.observe_step = self._observe
        disk = DiskStore(scratch)
        self._source = AdapterReader(StoredBlobs(disk, disk), self.parts)
        self.refs = [self._ref(folder, disk) for folder in folders]

    def run(self, requests: Sequence[InferenceRequest], num_at_once: int) -> None:
        """To their ends."""
        left = list(requests)
        scheduler = self.engine.scheduler
        while left or scheduler.running or scheduler.waiting:
            while left and len(scheduler.running) + len(scheduler.waiting) < num_at_once:
                scheduler.add(left.pop())
            while self._loading:
                self._load(self._loading.pop())
            self.engine.step()
        self._note_copies()

    def _observe(self, load: StepLoad, seconds: float) -> None:
        self.recording.steps.append((load, seconds))

    def _load(self, ref: AdapterRef) -> None:
        for tier in ("remote", "disk"):
            start = time.perf_counter()
            loaded = self._source.load(ref)
            seconds = time.perf_counter() - start
            self.recording.loads[tier].append((ref.num_bytes, seconds))
            self._source.keep(ref, loaded.value)
        self.engine.load_finished(LoadFinished(ref.digest, loaded.value, None, seconds, loaded.times))

    def _note_copies(self) -> None:
        found = self.engine.stats().adapters
        times = [(ref.num_bytes, found[ref.digest].last_load) for ref in self.refs if ref.digest in found]
        self.recording.loads["copy"] = [(size, load.copy) for size, load in times if load is not None]

    def _ref(self, folder: Path, disk: DiskStore) -> AdapterRef:
        artifact = read_artifact(folder, self.parts.spec)
        host = self.parts.fold(read_weights(folder, artifact))
        disk.put(artifact.digest, folder)
        return AdapterRef("bench", f"bench/{folder.name}", 1, artifact.digest, host.rank, host.num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "135m"), default="demo")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, help="default: the simulator's profile of that name")
    options = parser.parse_args()
    folder = Path("lora_serve/simulate/profiles")
    out = options.out or folder / f"{options.model}-cpu.json"
    profile = record_profile(options.model, options.steps, options.cache)
    out.write_text(profile_text(profile))
    print(f"{out.name}: {profile['source']}")


def record_profile(name: str, num_steps: int, cache: Path, flags: dict[str, Any] | None = None) -> dict[str, Any]:
    """The profile's JSON."""
    model, folders = checkpoints(name, cache)
    with tempfile.TemporaryDirectory() as scratch:
        flags = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory": 2**28, **(flags or {})}
        engine = RecordedEngine(model, folders, Path(scratch), flags)
        generator = random.Random(0)
        while len(engine.recording.steps) < num_steps + WARM_STEPS:
            for num_rows in (1, 4, MAX_ROWS):
                for refs in ([], engine.refs[:1], engine.refs):
                    requests = _requests(generator, num_rows, refs, engine.parts.spec.vocab_size)
                    engine.run(requests, num_rows)
        steps = engine.recording.steps[WARM_STEPS:]
        chosen = generator.sample(steps, min(num_steps, len(steps)))
        return _profile(name, engine, chosen)


def checkpoints(name: str, cache: Path) -> tuple[Path, list[Path]]:
    """The model's folder and its adapters'."""
    if name == "demo":
        return DATA / "model", sorted(file.parent for file in (DATA / "adapters").glob("*/*/adapter_config.json"))
    model, adapters = make_checkpoints(cache, name, MAX_ROWS, 0)
    return model, list(adapters.values())


def _requests(
    generator: random.Random, num_rows: int, refs: Sequence[AdapterRef], vocab_size: int
) -> list[InferenceRequest]:
    requests = []
    for index in range(num_rows + 1):
        prompt = tuple(generator.choices(range(10, vocab_size), k=generator.randint(16, 256)))
        sampling = SamplingParams(max_tokens=generator.randint(4, 24), temperature=0.0, ignore_eos=True)
        uses = (AdapterUse(refs[index % len(refs)]),) if refs else ()
        requests.append(InferenceRequest(f"r{index}", prompt, sampling, uses, arrival_time=time.monotonic()))
    return requests


def _profile(name: str, engine: RecordedEngine, steps: Sequence[tuple[StepLoad, float]]) -> dict[str, Any]:
    facts, loads, batch = machine(), engine.recording.loads, engine.settings.part(EngineConfig).batch
    learned = LearnedSteps(steps)
    errors = [abs(learned.seconds(load) / seconds - 1) for load, seconds in steps]
    off = round(100 * statistics.median(errors))
    source = (
        f"recorded: {len(steps)} steps of the {name} model in {engine.parts.spec.dtype} on {facts['cores']} cores of "
        f"{facts['cpu']} with {torch.get_num_threads()} of torch's threads; the learned cost is {off} % off in the "
        "median. Loads from a warm page cache: `remote` is an adapter's own files, `disk` its prepared file."
    )
    return {
        "source": source,
        "steps": {"recorded": [[*_features(load), round(seconds, 6)] for load, seconds in steps]},
        **{tier: fit(samples) for tier, samples in loads.items()},
        "limits": {
            "max_num_seqs": MAX_ROWS,
            "max_num_batched_tokens": batch.max_num_batched_tokens,
            "max_model_len": engine.parts.spec.max_model_len,
            "num_blocks": engine.parts.num_blocks,
            "block_size": engine.settings.block_size,
            "adapter_bytes": int(statistics.fmean(ref.num_bytes for ref in engine.refs)),
            "adapter_rank": max(ref.rank for ref in engine.refs),
            "max_loras": MAX_ROWS,
            "host_bytes": engine.settings.part(AdapterConfig).adapter_host_memory,
            "disk_bytes": 2**40,
            "load_threads": engine.settings.adapter_load_threads,
        },
    }


def fit(samples: Sequence[Transfer]) -> dict[str, float]:
    """Least squares of `TransferTime`; where sizes do not explain anything, the median is per load."""
    sizes, seconds = zip(*samples, strict=True)
    slope, start = 0.0, statistics.median(seconds)
    if len(set(sizes)) > 1:
        slope, start = statistics.linear_regression(sizes, seconds)
    if slope <= 0 or start < 0:
        slope, start = 0.0, statistics.median(seconds)
    return {"per_load": round(start, 6), "bytes_per_second": round(1 / slope) if slope else 1e12}


def profile_text(profile: dict[str, Any]) -> str:
    """JSON with one recorded step per line."""
    steps = profile["steps"]["recorded"]
    text = json.dumps({**profile, "steps": {"recorded": "STEPS"}}, indent=1)
    lines = ",\n   ".join(json.dumps(step) for step in steps)
    return text.replace('"STEPS"', f"[\n   {lines}\n  ]") + "\n"


def _features(load: StepLoad) -> list[int]:
    return [load.num_tokens, load.num_rows, load.num_adapters, load.num_kv_read]


if __name__ == "__main__":
    main()
