"""What grows with the number of registered adapters: nothing of it is in the model, so none runs here.

The real catalog on SQLite, the real scheduler, slot table and host cache, and a runner that answers at once. Requests
name adapters by Zipf 1.1, 16 at a time, over 8 slots. "all on the host": every adapter is in host memory; "a fifth on
the host": memory holds every fifth, so that adapters are loaded (at once) and evicted all the time. Steps and requests
are timed by the processor time of this process, what touches the disk by the clock.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration, new_entry
from lora_serve.adapters.catalog.entry import VersionEntry
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.catalog.state import saved
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, BlockMoves, RowAdapter, RowOutput, SlotRef
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import Engine, build_engine
from lora_serve.engine.loader import LoadFinished

T = TypeVar("T")
COUNTS = (10, 100, 1_000, 10_000)
NUM_USERS, NUM_SLOTS, NUM_REQUESTS = 16, 8, 600
PROMPT, OUTPUT = 8, 16  # tokens
ADAPTER_BYTES = 10_000_000  # as the tables count them; nothing is that large here
ZIPF = 1.1
_LOOK_UPS = 2_000


class InstantRunner:
    """Answers every row with one token, at once."""

    def load_slot(self, slot: SlotRef, adapter: object) -> None: ...

    def clear_slot(self, index: int) -> None: ...

    def move_blocks(self, moves: BlockMoves) -> None: ...

    def run(self, batch: Batch) -> list[RowOutput]:
        return [RowOutput(row.sequence_id, 7 if row.sample is not None else None) for row in batch.rows]

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        return SmokeTestResult(1.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the requests did, in microseconds."""

    us_per_request: float
    us_per_step: float
    steps_per_request: float
    loads_per_request: float
    stats_us: float  # one snapshot for the metrics


def measure(count: int) -> dict[str, float]:
    """Microseconds by what is done with `count` adapters registered."""
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch)
        catalog = open_catalog(store)
        names = fill(catalog, count)
        chosen = zipf(names, _LOOK_UPS)
        found = {
            "resolve a name": per_call(catalog.resolve, chosen),
            "register one more": per_call(
                lambda i: Registration(id=f"new/a{i}").commit(catalog.ledger, version_of(f"new/a{i}")), range(20)
            ),
            "list a page of 100": per_call(lambda _: catalog.snapshot.page(limit=100), range(50)),
        }
        refs = [catalog.resolve(name).ref for name in names]
        catalog.close()
        start = time.perf_counter()
        open_catalog(store).close()
        found["open the catalog"] = (time.perf_counter() - start) * 1e6
    for title, share in (("all on the host", 1), ("a fifth on the host", 5)):
        traffic = serve(refs, count // share)
        found[f"step, {title}"] = traffic.us_per_step
        found[f"request, {title}"] = traffic.us_per_request
        found[f"steps per request, {title}"] = traffic.steps_per_request
        found[f"loads per request, {title}"] = traffic.loads_per_request
        found[f"statistics, {title}"] = traffic.stats_us
    return {name: round(value, 3) for name, value in found.items()}


def fill(catalog: Catalog, count: int) -> list[str]:
    """Register `count` adapters of a tenth as many tenants, in one commit; their names."""
    names = [f"tenant{i // 10}/a{i}" for i in range(count)]
    entries = [new_entry(name, name.partition("/")[0], version_of(name), False, None) for name in names]
    changes = {key: text for entry in entries for key, text in saved(entry).items()}
    catalog.ledger.change(lambda state: (changes, None))
    return names


def version_of(name: str) -> VersionEntry:
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    return VersionEntry(1, digest, 16, ADAPTER_BYTES, {"r": 16}, "made by a benchmark", 0.0)


def serve(refs: Sequence[AdapterRef], num_on_host: int) -> Traffic:
    """NUM_REQUESTS requests in a closed loop of NUM_USERS, after as many to warm up."""
    loading: list[AdapterRef] = []
    engine = engine_of(loading, max(num_on_host, NUM_SLOTS + 1))
    for ref in refs[:num_on_host]:
        engine.residency.host.put(ref.digest, object(), ref.num_bytes, ref.tenant, load_seconds=0.05)
    numbers = itertools.count()
    chosen = zipf(refs, 2 * NUM_REQUESTS)
    _drive(engine, loading, chosen[:NUM_REQUESTS], numbers)
    start = time.process_time()
    num_steps, num_loads = _drive(engine, loading, chosen[NUM_REQUESTS:], numbers)
    seconds = time.process_time() - start
    stats = per_call(lambda _: engine.stats(), range(20))
    return Traffic(
        seconds / NUM_REQUESTS * 1e6,
        seconds / num_steps * 1e6,
        num_steps / NUM_REQUESTS,
        num_loads / NUM_REQUESTS,
        stats,
    )


def engine_of(loading: list[AdapterRef], num_on_host: int) -> Engine:
    settings = Settings(
        model="none",
        max_loras=NUM_SLOTS,
        max_num_seqs=NUM_USERS,
        adapter_host_memory=num_on_host * ADAPTER_BYTES,
    )
    spec = ModelSpec("none", "None", 1000, 512, (), 1, {}, 0, "float32", "cpu")
    slices = settings.part(EngineConfig), settings.part(AdapterConfig)
    return build_engine(InstantRunner(), spec, 1024, *slices, loading.append)


def _drive(
    engine: Engine, loading: list[AdapterRef], chosen: Sequence[AdapterRef], numbers: itertools.count[int]
) -> tuple[int, int]:
    """Steps and loads until all are answered."""
    left, num_steps, num_loads = iter(chosen), 0, 0
    scheduler = engine.scheduler
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    while True:
        room = NUM_USERS - len(scheduler.running) - len(scheduler.waiting)
        for ref in itertools.islice(left, room):
            number = next(numbers)
            prompt = tuple(10 + (number + i) % 900 for i in range(PROMPT))
            now = time.monotonic()
            scheduler.add(InferenceRequest(f"r{number}", prompt, sampling, (AdapterUse(ref),), arrival_time=now))
        if not scheduler.running and not scheduler.waiting:
            return num_steps, num_loads
        while loading:
            engine.load_finished(LoadFinished(loading.pop().digest, object(), None, 0.05))
            num_loads += 1
        engine.step()
        num_steps += 1


def zipf(items: Sequence[T], count: int) -> list[T]:
    """`count` of them, rank k with a probability that falls with k ** 1.1."""
    weights = [rank**-ZIPF for rank in range(1, len(items) + 1)]
    return random.Random(0).choices(items, weights, k=count)


def per_call(call: Callable[[T], object], arguments: Sequence[T]) -> float:
    """Median microseconds."""
    times = []
    for argument in arguments:
        start = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
