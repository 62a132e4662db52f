"""The work of the live view piece by piece, in processor time of one thread: the least of many, so that neighbours of a
busy machine count little.

    python -m benchmarks.console_parts [--write]

On the engine's thread: the notes of a step of 16 rows, and a look. On the event loop: a look taken in and made a frame
of, and its way to each of 1 and 20 readers, which are in another process. `python -m benchmarks.console` measures the
whole on a real server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from aiohttp import web

from benchmarks.report import machine, result_file
from lora_serve.console.live.hub import Hub, Watched
from lora_serve.core.live import EngineView, LiveStep, LiveTier
from lora_serve.core.messages import TokenEvent, Watch
from lora_serve.engine.engine import Engine
from tests.engine.world import World, adapter

ROWS, STEPS = 16, 40  # rows of a step, steps of a frame: those of 5 ms at 5 frames per second
ROUNDS = 15


def main() -> int:
    """Measures the pieces, and prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="the report into benchmarks/results")
    asked = parser.parse_args()
    world = busy_world()
    pieces = {**engine_pieces(world), **asyncio.run(loop_pieces(world.engine))}
    print(json.dumps(pieces, indent=1))
    if asked.write:
        report = {"command": "python -m benchmarks.console_parts", "machine": machine(), "rows": ROWS, "steps": STEPS}
        result_file("console-parts").write_text(json.dumps({**report, "microseconds": pieces}, indent=1) + "\n")
    return 0


def busy_world() -> World:
    """An engine without a model that runs 16 rows over 8 adapters."""
    world = World(num_blocks=4000, max_num_seqs=ROWS, max_loras=8, max_model_len=4000, max_num_batched_tokens=512)
    for number in range(ROWS):
        world.add(f"{number:032x}-0", [1, 2, 3], adapter(f"tenant/adapter{number % 8}"), max_tokens=3000)
    while len(world.scheduler.running) < ROWS:
        world.step()
    return world


def engine_pieces(world: World) -> dict[str, float]:
    """Microseconds on the engine's thread."""
    engine, recorder = world.engine, world.engine.recorder
    engine.view(Watch(1))
    for _ in range(STEPS):
        world.step()
    batch, now = world.runner.batches[-1], time.monotonic()
    events = [TokenEvent(sequence.request.request_id, 5, None) for sequence in world.scheduler.running]
    since = recorder.mark - STEPS
    pieces = {
        "a look at 16 rows": least(lambda: engine.view(Watch(1, since)), 50),
        "a look in full, once a second": least(lambda: engine.view(Watch(1, since, (), in_full=True)), 50),
    }
    ran = world.scheduler.running_by_id()
    pieces["notes of a step"] = least(lambda: recorder.step(1, batch, ran, events, now, now), 300)
    recorder.is_on = False
    pieces["a step while nobody looks"] = least(lambda: recorder.is_on or None, 3000)
    return {f"engine: {name}": round(value, 2) for name, value in pieces.items()}


def least(call: Callable[[], object], count: int) -> float:
    """Microseconds of a call."""
    found = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(count):
            call()
        found.append((time.thread_time() - start) / count)
    return 1e6 * min(found)


class Repeating:
    """Gives one look again and again, each time with the steps since."""

    def __init__(self, look: EngineView) -> None:
        self.look = look
        self.num_looks = 0

    async def watch(
        self, seen: Mapping[str, int], tenants: Collection[str] = (), *, in_full: bool = False
    ) -> list[EngineView]:
        """See `EngineClient.watch`."""
        self.num_looks += 1
        return [self.look]


async def loop_pieces(engine: Engine) -> dict[str, float]:
    """Microseconds of the event loop for each frame, by the number of readers."""
    look = engine.view(Watch(1, 0, (), in_full=True))
    row = tuple((request.id, "decode", 1, 1) for request in look.requests)
    steps = tuple(LiveStep(number, time.time() + number / 200, 5.0, False, row) for number in range(STEPS))
    source = Repeating(EngineView(1, steps, look.requests, slots=look.slots, queue=look.queue, settings=look.settings))

    async def no_tiers() -> Mapping[str, LiveTier]:
        return {}

    client: Any = source
    hub = Hub(Watched(client, no_tiers, lambda: 0, lambda: None))

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        async with hub.viewing(None, 10) as viewer:
            await response.prepare(request)
            while True:
                if (frame := await viewer.next()) is not None:
                    await response.write(frame)

    app = web.Application()
    app.router.add_get("/admin/engine/stream", stream)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    found = {count: await frame_cost(source, url, count) for count in (1, 20)}
    await runner.cleanup()
    each = (found[20] - found[1]) / 19
    return {
        "event loop: a frame": round(found[1] - each, 2),
        "event loop: a frame's way to each reader": round(each, 2),
    }


async def frame_cost(source: Repeating, url: str, count: int) -> float:
    """Microseconds of this thread for each look while so many readers read."""
    command = [sys.executable, "-m", "benchmarks.console", "view", url, str(count), "10"]
    child = await asyncio.create_subprocess_exec(*command)
    await asyncio.sleep(4)
    found = []
    for _ in range(ROUNDS):
        start, before = time.thread_time(), source.num_looks
        await asyncio.sleep(0.5)
        found.append((time.thread_time() - start) / (source.num_looks - before))
    child.terminate()
    await child.wait()
    return 1e6 * min(found)


if __name__ == "__main__":
    sys.exit(main())
