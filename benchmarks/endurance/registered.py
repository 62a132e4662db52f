"""A server with 1 000, 10 000 and 100 000 registered adapters: its start, its memory, and what an act costs.

The adapters are files of different content in the store, with the records beside them, as registrations leave them;
they are written by this process, since registering 100 000 one by one would take hours.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.endurance.process import peak_mib, processor_seconds
from benchmarks.reliability.site import ADMIN, Site, usage_of
from lora_serve.adapters.catalog.blob_records import BlobRecord, key_of, text_of
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.entry import CatalogEntry, document_of
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.catalog.state import ADAPTER
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME
from lora_serve.commands.server_process import ServerProcess
from tests.canary.races import question

COUNTS = (1_000, 10_000, 100_000)
NUM_TENANTS = 100
PAGE = 1000  # ids of a page when all are listed
TIMES = 9  # how often a short act is timed
SWEEPS = 3  # likewise of all pages
PATIENCE = 600.0


def registered(site: Site, counts: Sequence[int] = COUNTS) -> dict[str, Any]:
    """Figures by number of adapters, and the exponent of each between every two sizes."""
    sizes = [_measure(site, count) for count in counts]
    keys = [key for key in sizes[0] if key not in ("adapters", "faults")]
    growth = {key: [_exponent(*pair, key) for pair in pairwise(sizes)] for key in keys}
    return {"sizes": sizes, "exponents": growth}


def _exponent(small: dict[str, Any], large: dict[str, Any], key: str) -> float | None:
    """k of `figure ~ adapters ** k` between two sizes."""
    if min(small[key], large[key]) <= 0:
        return None
    return round(math.log(large[key] / small[key]) / math.log(large["adapters"] / small["adapters"]), 2)


def _measure(site: Site, count: int) -> dict[str, Any]:
    name = f"registered-{count}"
    store = site.root / name
    with site.server(name) as process:  # one real registration, which the others are copies of
        asyncio.run(_register(process, "first/one", site.world.adapters["acme/a"]))
        bare = usage_of(process)["memory"]
    digests = fill(store, count - 1)
    started = time.monotonic()
    with site.server(name) as process:
        ready = time.monotonic() - started
        figures = {
            "adapters": count,
            "start_s": round(ready, 2),
            "start_processor_s": round(processor_seconds(process), 2),
            "bytes_of_memory_for_each": round((usage_of(process)["memory"] - bare) * 2**20 / count),
            "peak_mib": round(peak_mib(process), 1),
            **asyncio.run(_acts(site, process, digests)),
        }
    print(f"registered: {figures}", flush=True)
    shutil.rmtree(store)
    return figures


def fill(store: Path, count: int) -> dict[str, str]:
    """Write `count` adapters like the one that is registered in a store that no server runs on; their digests by id."""
    with closing(open_catalog(store)) as catalog:
        (entry,) = catalog.snapshot.entries.values()
        blob = store / "blobs" / entry.default.digest.removeprefix("sha256:")
        config, weights = (blob / CONFIG_NAME).read_bytes(), (blob / WEIGHTS_NAME).read_bytes()
        digests = {}
        for number in range(count):
            digests[f"tenant{number % NUM_TENANTS}/adapter-{number:06}"] = _write(store, config, weights, number)
        texts = _enter(catalog, digests, entry)
        _note(store, catalog, digests, texts)
    return digests


def _write(store: Path, config: bytes, weights: bytes, number: int) -> str:
    """The digest of a sibling: the last weight is another number."""
    content = weights[:-4] + (0x3C000000 + number).to_bytes(4, "little")  # about 0.0078
    inner = hashlib.sha256(config).digest() + hashlib.sha256(content).digest()
    hexadecimal = hashlib.sha256(inner).hexdigest()
    folder = store / "blobs" / hexadecimal
    folder.mkdir(mode=0o700)
    (folder / CONFIG_NAME).write_bytes(config)
    (folder / WEIGHTS_NAME).write_bytes(content)
    return f"sha256:{hexadecimal}"


def _enter(catalog: Catalog, digests: dict[str, str], like: CatalogEntry) -> dict[str, str]:
    """Commit ids like one that is there; the texts of their records by id."""
    document = json.loads(document_of(like))
    (version,) = document["versions"]
    texts = {}
    for name, digest in digests.items():
        own = {"name": name, "tenant": name.partition("/")[0], "versions": [{**version, "digest": digest}]}
        texts[name] = json.dumps(document | own)
    catalog.ledger.change(lambda state: ({ADAPTER + name: text for name, text in texts.items()}, None))
    return texts


def _note(store: Path, catalog: Catalog, digests: dict[str, str], texts: dict[str, str]) -> None:
    """Write the records beside the blobs."""
    state = catalog.ledger.state
    entry = next(iter(state.snapshot.entries.values()))
    record = json.loads(text_of(BlobRecord(entry, {}, state.position, time.time(), state.epochs)))
    for name, text in texts.items():
        folder = store / "blobs" / digests[name].removeprefix("sha256:")
        (folder / f"named-{key_of(name)}.json").write_text(json.dumps(record | {"entry": json.loads(text)}))


async def _acts(site: Site, process: ServerProcess, digests: dict[str, str]) -> dict[str, Any]:
    """Milliseconds of calls, medians; `faults`: ids that were not served as themselves."""
    names, faults = sorted(digests), list[str]()
    async with aiohttp.ClientSession(process.url, headers=ADMIN, timeout=aiohttp.ClientTimeout(PATIENCE)) as session:

        async def get(path: str) -> Any:
            async with session.get(path) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        async def ask(number: int) -> None:
            name = names[number * len(names) // TIMES]
            async with session.post("/v1/completions", json=question(name, 0)) as answer:
                if answer.status != 200 or answer.headers["X-Adapter-Digest"] != digests[name]:
                    faults.append(f"{name}: {answer.status}: {(await answer.text())[:200]}")

        async def put(number: int) -> None:
            await _register(process, f"new/{number}", list(site.runners.folders.values())[number])

        async def delete(number: int) -> None:
            async with session.delete(f"/admin/adapters/{names[number]}") as answer:
                assert answer.status == 200, await answer.text()

        middle = names[len(names) // 2]
        figures = {
            "cold_answer_ms": await _median(ask),
            "first_page_ms": await _median(lambda _: get("/admin/adapters?limit=100")),
            "middle_page_ms": await _median(lambda _: get(f"/admin/adapters?limit=100&after={middle}")),
            "sorted_page_ms": await _median(lambda _: get("/admin/adapters?limit=100&sort=bytes&fields=summary")),
            "models_of_a_tenant_ms": await _median(lambda _: get("/admin/adapters?limit=100&tenant=tenant7")),
            "all_pages_ms": statistics.median([await _all_pages(get, len(digests) + 1) for _ in range(SWEEPS)]),
            "register_ms": await _median(put),
            "delete_ms": await _median(delete),
        }
    return {**figures, "faults": faults}


async def _all_pages(get: Callable[[str], Awaitable[Any]], count: int) -> float:
    started, found, after = time.perf_counter(), 0, ""
    while True:
        page = await get(f"/admin/adapters?limit={PAGE}{after}")
        found += len(page["data"])
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert found == count, (found, count)
    return round((time.perf_counter() - started) * 1e3, 1)


async def _median(call: Callable[[int], Awaitable[Any]]) -> float:
    times = []
    for number in range(TIMES):
        started = time.perf_counter()
        await call(number)
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e3, 2)


async def _register(process: ServerProcess, name: str, folder: Path) -> None:
    body = {"id": name, "source": str(folder)}
    async with (
        aiohttp.ClientSession(process.url, headers=ADMIN) as session,
        session.post("/admin/adapters", json=body) as answer,
    ):
        assert answer.status == 201, await answer.text()
