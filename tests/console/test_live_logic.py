"""What the live page makes of the stream's frames, in a real browser: no server's model, made-up frames."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from playwright.async_api import Page

from tests.console.conftest import OpenPage
from tests.console.made_up_engine import MadeUpEngine
from tests.console.made_up_server import application, hello

ADAPTERS = ["acme/sql", "lumen/support", "pulse/sentiment", "demo-base"]
START = 1_790_000_000.0


@pytest_asyncio.fixture(loop_scope="session")
async def page(open_page: OpenPage) -> AsyncIterator[Page]:
    engine = MadeUpEngine(ADAPTERS, now=START)
    async with TestServer(application(engine.frame)) as server:
        opened = await open_page(str(server.make_url("/")).rstrip("/"))
        await opened.evaluate(
            """async (hello) => {
                const load = (name) => import(`./pages/live/${name}.js`);
                Object.assign(window, await load("history"), await load("layout"), await load("moment"),
                              await load("view"), await load("choices"), await load("stage"), await load("clock"),
                              await load("present"));
                window.past = new History();
                past.greet(hello);
            }""",
            hello(),
        )
        yield opened


def frame(time: float, *, steps: Any = (), requests: Any = (), number: int = 1, num_waiting: int = 0) -> dict[str, Any]:
    made = {"time": time, "number": number, "steps": steps, "requests": requests, "num_waiting": num_waiting}
    return made | {"num_running": 0, "queue": {}, "slots": []}


def step(number: int, time: float, *rows: tuple[str, str, int], ms: float = 10.0) -> dict[str, Any]:
    return {
        "replica": "",
        "number": number,
        "time": time,
        "ms": ms,
        "is_gap": False,
        "rows": [[*row, 1] for row in rows],
    }


def request(name: str, state: str = "running", *, arrived: float = START, reason: str | None = None) -> dict[str, Any]:
    use = {"name": "acme/sql", "version": 1, "digest": "sha256:aa", "scale": 1.0}
    made = {"id": name, "replica": "", "tenant": "acme", "adapters": [use], "state": state, "num_prompt": 9}
    made |= {"num_computed": 9, "num_output": 1, "num_cached": 0, "arrived": arrived, "first_token_ms": 5.0}
    return made | {"reason": reason}


async def fold(page: Page, *frames: dict[str, Any]) -> None:
    await page.evaluate("text => JSON.parse(text).forEach((frame) => past.fold(frame))", json.dumps(frames))


async def lanes(page: Page, time: float, count: int = 4) -> list[str | None]:
    found: list[str | None] = await page.evaluate(
        "([time, count]) => [...Array(count).keys()].map((lane) => past.runningIn('', lane, time)?.id ?? null)",
        [time, count],
    )
    return found


async def test_a_lane_is_kept_until_its_request_ends_and_then_goes_to_the_next(page: Page) -> None:
    t = START
    both = step(1, t + 0.1, ("a", "prefill", 9), ("b", "prefill", 9))
    last = step(2, t + 0.2, ("a", "decode", 1), ("b", "decode", 1))
    after = step(3, t + 0.3, ("b", "decode", 1), ("c", "prefill", 9))
    await fold(page, frame(t + 0.15, steps=[both], requests=[request("a"), request("b")]))
    done = request("a", "finished", reason="stop")
    await fold(page, frame(t + 0.35, number=2, steps=[last, after], requests=[done, request("b"), request("c")]))
    assert await lanes(page, t + 0.15) == ["a", "b", None, None]
    assert await lanes(page, t + 0.295) == ["c", "b", None, None]
    assert await page.evaluate("past.tracks.get('a').end") == t + 0.2


async def test_a_request_waits_at_a_place_and_leaves_it_for_a_lane(page: Page) -> None:
    t = START
    waits = frame(t + 1, requests=[request("a", "loading"), request("b", "waiting")], num_waiting=2)
    await fold(page, waits)
    assert await page.evaluate("time => [past.queuedIn(0, time)?.id, past.queuedIn(1, time)?.id]", t + 1) == ["a", "b"]
    await fold(page, frame(t + 2, number=2, steps=[step(1, t + 1.9, ("a", "prefill", 9))], requests=[request("a")]))
    assert await page.evaluate("time => past.queuedIn(0, time)?.id ?? null", t + 2) is None
    assert await lanes(page, t + 2, 1) == ["a"]
    states = "time => [past.tracks.get('a').stateAt(time), past.tracks.get('a').stateAt(time - 1)]"
    assert await page.evaluate(states, t + 2) == ["running", "loading"]


async def test_steps_that_were_left_out_are_counted_unless_nobody_listened(page: Page) -> None:
    row = ("a", "decode", 1)
    await fold(
        page, frame(START + 1, steps=[step(5, START + 0.9, row), step(9, START + 1, row)], requests=[request("a")])
    )
    assert await page.evaluate("past.missing") == 3
    assert await page.evaluate("hello => past.greet(hello)", hello()) is False
    await fold(page, frame(START + 2, steps=[step(90, START + 2, row)], requests=[request("a")]))
    assert await page.evaluate("past.missing") == 3
    assert await page.evaluate("hello => past.greet(hello)", hello() | {"started": START + 2}) is True
    await fold(page, frame(START + 3, steps=[step(1, START + 3, row)], requests=[request("a")]))
    assert await page.evaluate("past.missing") == 3


async def test_a_step_without_rows_has_those_of_the_step_before_on_its_replica(page: Page) -> None:
    t = START
    rows = [("a", "decode", 1), ("b", "decode", 2)]
    other = step(7, t + 0.15, ("c", "prefill", 9)) | {"replica": "r2"}
    same = [{name: value for name, value in step(2, t + 0.2).items() if name != "rows"} | {"replica": ""}]
    asked = [request("a"), request("b"), request("c") | {"replica": "r2"}]
    await fold(page, frame(t + 0.3, steps=[step(1, t + 0.1, *rows), other, *same], requests=asked))
    marks = await page.evaluate("past.steps.get('').marks.map(({number, rows, tokens}) => [number, rows, tokens])")
    assert marks == [[1, 2, 3], [2, 2, 3]]
    assert await page.evaluate("past.tracks.get('b').cells.length") == 2


async def test_a_tenants_steps_have_holes_and_none_is_missing(page: Page) -> None:
    await page.evaluate("hello => past.greet(hello)", hello("acme"))
    row = ("a", "decode", 1)
    await fold(
        page, frame(START + 1, steps=[step(5, START + 0.9, row), step(9, START + 1, row)], requests=[request("a")])
    )
    await fold(page, frame(START + 2, number=4))
    assert await page.evaluate("[past.missing, past.missingFrames]") == [0, 2]


async def test_no_token_is_lost_or_doubled_in_columns_of_any_width(page: Page) -> None:
    await run(page, seconds=6)
    for span in (2, 5, 15, 60):
        told = await page.evaluate(
            """([span, start]) => {
                const scale = 900 / span;
                let shown = 0, all = 0;
                for (const track of past.tracks.values()) {
                    const columns = columnsOf(track.cells, -1e6, 1e6, scale, start);
                    for (const one of columns) shown += one.prefill + one.decode + one.draft + one.pool;
                    for (let at = 1; at < columns.length; at++) {
                        const before = columns[at - 1];
                        if (columns[at].left < before.left) throw new Error("columns go back");
                    }
                    for (let at = 0; at < track.cells.length; at++) all += track.cells.tokens[at];
                }
                return [shown, all];
            }""",
            [span, START],
        )
        assert told[0] == told[1] > 500


async def test_steps_narrower_than_a_column_share_columns_that_stand_still(page: Page) -> None:
    steps = [step(at, START + 0.01 * at, ("a", "decode", 1), ms=1.0) for at in range(1, 41)]  # a pixel each
    await fold(page, frame(START + 1, steps=steps, requests=[request("a")]))
    shared = """([from, start]) => columnsOf(past.tracks.get("a").cells, from, 1000, 100, start)
        .map(({ left, width, decode }) => [left, width, decode])"""
    columns = await page.evaluate(shared, [0, START])
    assert [left for left, _, _ in columns] == [4 * at for at in range(10)]
    assert {(width, tokens) for _, width, tokens in columns[1:]} == {(4, 4)}
    assert (await page.evaluate(shared, [20, START]))[-5:] == columns[-5:]  # a later tile begins elsewhere


async def test_a_wide_step_is_one_column_as_long_as_it_took(page: Page) -> None:
    rows = (("a", "prefill", 128), ("b", "prefill", 32), ("c", "decode", 1))
    asked = [request(name) for name, _, _ in rows]
    await fold(page, frame(START + 1, steps=[step(1, START + 1, *rows, ms=400.0)], requests=asked))
    lengths = await page.evaluate(
        """start => ["a", "b", "c"].map((id) => {
            const [column] = columnsOf(past.tracks.get(id).cells, 0, 1000, 100, start);
            return [column.left, column.width, lengthOf(column)].map(Math.round);
        })""",
        START,
    )
    assert lengths == [[60, 40, 39], [60, 40, 10], [60, 40, 3]]


async def test_a_moment_holds_every_row_of_its_step_and_its_neighbours(page: Page) -> None:
    rows = (("a", "prefill", 7), ("b", "decode", 1))
    steps = [
        step(1, START + 0.5, *rows),
        step(2, START + 0.6, ("b", "decode", 1)),
        step(3, START + 0.9, ("b", "decode", 1)),
    ]
    await fold(page, frame(START + 1, steps=steps, requests=[request("a"), request("b")]))
    told = await page.evaluate(
        """start => {
            const { step, rows, track } = momentAt(past, { time: start + 0.48, replica: "", id: "b" });
            const next = neighbour(past, "", start + 0.48, 1);
            return [step.number, rows.map((row) => [row.track.id, row.kind, row.tokens]), track.id,
                    momentAt(past, { time: next, replica: "", id: null }).step.number];
        }""",
        START,
    )
    assert told == [1, [["a", "prefill", 7], ["b", "decode", 1]], "b", 2]


async def test_a_moment_between_two_frames_has_its_own_counts(page: Page) -> None:
    t = START
    before = frame(t + 1, requests=[request("a", "waiting", arrived=t + 0.9)]) | {
        "queue": {"acme": {"running": 0, "waiting": 1}, "globex": {"running": 0, "waiting": 5}}
    }  # of those that wait a frame names the first
    steps = [step(1, t + 1.4, ("a", "prefill", 9), ("b", "prefill", 9)), step(2, t + 1.6, ("b", "decode", 1))]
    after = frame(
        t + 2, number=2, steps=steps, requests=[request("a", "finished", reason="stop"), request("b", arrived=t + 1.2)]
    ) | {"queue": {"acme": {"running": 1, "waiting": 0}}}
    await fold(page, before, after)
    times = [t + 1.1, t + 1.3, t + 1.395, t + 1.5, None]
    told = await page.evaluate("times => times.map((time) => presentAt(past, time))", times)
    acme = [(one["tenants"]["acme"]["running"], one["tenants"]["acme"]["waiting"]) for one in told]
    assert acme == [(0, 1), (0, 2), (2, 0), (1, 0), (1, 0)]
    assert [one["tenants"].get("globex", {}).get("waiting") for one in told] == [5, 5, 5, 5, None]
    assert [(one["running"], one["waiting"]) for one in told] == [(0, 6), (0, 7), (2, 5), (1, 5), (1, 0)]
    assert [one["rows"] for one in told[2:]] == [{"": 2}, {"": 1}, {"": 1}]


@pytest.mark.nightly
async def test_two_minutes_are_kept_and_no_more_unless_they_are_held(page: Page) -> None:
    await run(page, seconds=300, every=1.0, step_seconds=0.2)
    kept = "() => [past.now - past.frames[0].time, past.now - past.steps.get('').marks[0].end]"
    frames, steps = await page.evaluate(kept)
    assert 119 <= frames < 140
    assert 119 <= steps < 200
    ended = await page.evaluate("Math.min(...[...past.tracks.values()].map((track) => track.end))")
    assert ended > START + 150
    await page.evaluate("past.heldFrom = past.now - 60")
    await run(page, seconds=200, every=1.0, start=START + 300, step_seconds=0.2)
    assert 255 < (await page.evaluate(kept))[0] < 300


async def test_the_clock_follows_the_fastest_frame_and_never_goes_back(page: Page) -> None:
    told = await page.evaluate(
        """() => {
            const clock = new Clock(0.35);
            clock.hear(100.0, 10.5);
            const first = clock.timeAt(11);
            clock.hear(101.0, 11.2);
            const second = clock.timeAt(11.2);
            clock.hear(102.0, 15.0);
            return [first, second, clock.timeAt(15)];
        }"""
    )
    assert told == pytest.approx([100.15, 100.65, 104.45])


@pytest.mark.nightly
async def test_a_picture_of_64_lanes_paints_what_changed_and_moves_the_rest(page: Page) -> None:
    paint = await painting(page)
    assert paint["lanes"] >= 64
    assert paint["steps"] >= 600
    assert paint["tiles"] > 15  # in sight
    assert paint["painted"] <= 4  # by the pictures after one frame of the stream


@pytest.mark.nightly  # it measures
async def test_a_picture_of_64_lanes_and_600_steps_takes_a_millisecond(page: Page) -> None:
    paint = await painting(page)
    assert paint["mean"] <= 1.0, paint
    assert paint["median"] <= 0.5, paint


async def run(page: Page, *, seconds: float, every: float = 0.2, start: float = START, **engine: Any) -> None:
    made = MadeUpEngine(ADAPTERS, **engine, now=start)
    times = [start + every * at for at in range(1, round(seconds / every) + 1)]
    await fold(page, *(made.frame(time) for time in times))


async def painting(page: Page) -> dict[str, Any]:
    """The cost of the pictures of 6 s of 64 lanes, 60 a second with 5 frames of the stream."""
    engine = MadeUpEngine(ADAPTERS, max_rows=64, load=64, now=START)
    frames = [engine.frame(START + 0.2 * at) for at in range(1, 151)]
    told: dict[str, Any] = await page.evaluate(
        """(text) => {
            const frames = JSON.parse(text);
            const stage = new Stage(document.createElement("canvas"));
            const colourOf = (digest) => `hsl(${digest.length * 37} 60% 60%)`;
            const costs = [], painted = [];
            let tiles = 0, boxes = [], steps = 0;
            const paint = CanvasRenderingContext2D.prototype.setTransform;
            let count = 0;
            CanvasRenderingContext2D.prototype.setTransform = function (...given) {
                count++;
                paint.apply(this, given);
            };
            frames.forEach((frame, at) => {
                const before = past.now;
                past.fold(frame);
                if (at < 120) return;
                if (at === 120) {
                    const stack = stackLanes(past, past.now - 20, past.now, 8);
                    ({ boxes } = stack);
                    stage.set(1200, stack.height, 1, {
                        history: past, boxes, scale: 60, origin: Math.floor(past.now), colourOf, bad: "", muted: "",
                    });
                    while (!stage.draw(past.now - 0.35, () => performance.now()));
                    tiles = stage.tiles.size;
                }
                stage.touch(before - 0.5);
                count = 0;
                for (let picture = 0; picture < 12; picture++) {
                    const started = performance.now();
                    stage.draw(past.now - 0.35 + picture / 60, () => performance.now());
                    costs.push(performance.now() - started);
                }
                painted.push(count);
            });
            CanvasRenderingContext2D.prototype.setTransform = paint;
            steps = past.steps.get("").marks.filter((mark) => mark.end > past.now - 20).length;
            costs.sort((one, other) => one - other);
            painted.sort((one, other) => one - other);
            const usual = costs.slice(0, Math.floor(costs.length * 0.95)); // the others waited for a processor
            return {
                lanes: boxes.length, steps, tiles, painted: painted[painted.length >> 1],
                mean: usual.reduce((sum, one) => sum + one, 0) / usual.length,
                median: costs[costs.length >> 1], p99: costs[Math.floor(costs.length * 0.99)], max: costs.at(-1),
            };
        }""",
        json.dumps(frames),
    )
    return told
