"""Viewers cost one look and one frame, whatever their number; nobody is told what is another's."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import chain

import pytest
from msgspec.structs import replace

from lora_serve.console.live import hub as hub_module
from lora_serve.console.live.frames import MAX_STEPS, Viewer
from lora_serve.console.live.hub import MAX_OF_TENANT, MAX_OF_TENANTS, MAX_VIEWERS
from lora_serve.core.errors import CapacityError, EngineLostError, NotReadyError
from lora_serve.core.live import LiveCount, LiveSlot
from tests.console.live.scripted_engine import (
    ScriptedEngine,
    hub_over,
    look,
    next_event,
    next_frame,
    parsed,
    request,
    step,
)


async def test_nobody_is_asked_while_nobody_looks() -> None:
    engine = ScriptedEngine()
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)
        assert engine.asked
    asked = len(engine.asked)
    await asyncio.sleep(0.3)
    assert len(engine.asked) == asked


async def test_all_viewers_of_one_scope_and_rate_share_a_look_and_a_frame() -> None:
    engine = ScriptedEngine(look("acme"))
    hub = hub_over(engine)
    async with AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(hub.viewing(None, 10)) for _ in range(20)]
        await asyncio.gather(*(next_frame(viewer) for viewer in viewers))
        asked = len(engine.asked)
        engine.steps.append(step(1, "acme"))
        frames = await asyncio.gather(*(viewer.next() for viewer in viewers))
        assert len({id(frame) for frame in frames}) == 1, "encoded once"
        assert len(engine.asked) <= asked + 2


async def test_a_viewer_that_lags_gets_the_latest_frame_alone() -> None:
    engine = ScriptedEngine(look("acme"))
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as slow, hub.viewing(None, 10) as quick:
        numbers = []
        for number in range(1, 5):
            engine.steps.append(step(number, "acme"))
            numbers.append((await next_frame(quick))["number"])
        assert numbers == [1, 2, 3, 4]
        frame = await next_frame(slow)
        assert frame["number"] == 4
        assert [one["number"] for one in frame["steps"]] == [4]


async def test_a_slow_viewer_gets_the_steps_of_all_looks_since() -> None:
    engine = ScriptedEngine(look("acme"))
    hub = hub_over(engine)

    async def steps_of(viewer: Viewer) -> list[list[int]]:
        """The numbers of the steps in each frame, until the sixth step was shown."""
        frames: list[list[int]] = []
        while not frames or 6 not in frames[-1]:
            frames.append([one["number"] for one in (await next_frame(viewer))["steps"]])
        return frames

    async with hub.viewing(None, 1) as slow, hub.viewing(None, 10) as quick:
        reading = asyncio.gather(steps_of(slow), steps_of(quick))
        for number in range(1, 7):
            asked = len(engine.asked)
            engine.steps.append(step(number, "acme"))
            while len(engine.asked) <= asked:
                await asyncio.sleep(0.01)
        in_slow, in_quick = await reading
    assert [*chain(*in_slow)] == [*chain(*in_quick)] == [1, 2, 3, 4, 5, 6]
    assert max(map(len, in_slow)) > 1
    assert len(in_slow) < len(in_quick)


async def test_of_too_many_steps_the_latest_are_shown() -> None:
    engine = ScriptedEngine(look("acme"))
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)
        engine.steps += [step(number, "acme") for number in range(MAX_STEPS + 50)]
        frame = await next_frame(viewer)
        assert [one["number"] for one in frame["steps"]] == list(range(50, MAX_STEPS + 50))


async def test_while_nothing_happens_a_frame_comes_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(look("acme", moves=()))
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)
        before = time.monotonic()
        await next_frame(viewer)
        assert 0.8 < time.monotonic() - before < 5
        engine.steps.append(step(1, "acme"))
        before = time.monotonic()
        await next_frame(viewer)
        assert time.monotonic() - before < 0.8


async def test_a_newcomer_is_shown_the_present_at_once() -> None:
    hub = hub_over(ScriptedEngine(look("acme", moves=())))
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)
        async with hub.viewing(None, 10) as newcomer:
            before = time.monotonic()
            await next_frame(newcomer)
            assert time.monotonic() - before < 0.8


async def test_a_tenant_is_shown_its_own_alone() -> None:
    engine = ScriptedEngine(look("acme", "globex", ended=(request("globex", 7, "finished", reason="stop"),)))
    hub = hub_over(engine)
    async with hub.viewing("acme", 10) as viewer:
        engine.steps = [step(1, "acme", "globex"), step(2, "globex")]
        async with asyncio.timeout(60):
            while (event := await viewer.next()) is None:
                pass
        assert b"globex" not in event
        frame = await next_frame(viewer)
    assert engine.asked[-1][1] == ("acme",)
    assert [one["id"] for one in frame["requests"]] == ["acme-r1"]
    assert [one["name"] for one in frame["slots"]] == ["acme/a"]
    assert frame["loading"] == ["sha256:acme-b"]
    assert frame["queue"] == {"acme": {"waiting": 0, "running": 1}}
    assert (frame["num_running"], frame["num_waiting"]) == (1, 0)
    assert {"tiers", "blocks", "limits", "preemptions", "restarts"}.isdisjoint(frame)
    assert [[row[0] for row in one["rows"]] for one in parsed(event)[1]["steps"]] == [["acme-r1"]]


async def test_rows_that_are_as_in_the_step_before_are_told_once() -> None:
    engine = ScriptedEngine(look("acme", "globex"))
    async with hub_over(engine).viewing(None, 10) as viewer:
        await next_frame(viewer)
        both = [step(1, "acme", "globex"), step(2, "acme", "globex")]
        other = [replace(step(number, "acme"), replica="b") for number in (7, 8)]
        engine.steps = [both[0], other[0], both[1], other[1], step(3, "acme"), step(4, "acme", "globex")]
        frame = await next_frame(viewer)
        told = [(one["replica"], one["number"], len(one["rows"]) if "rows" in one else None) for one in frame["steps"]]
        assert told == [("", 1, 2), ("b", 7, 1), ("", 2, None), ("b", 8, None), ("", 3, 1), ("", 4, 2)]
        engine.steps = [step(5, "acme", "globex")]
        assert [len(one["rows"]) for one in (await next_frame(viewer))["steps"]] == [2], "each frame is whole in itself"


async def test_rows_of_the_same_bytes_under_a_foreign_name_are_not_told() -> None:
    shared, same = request("globex"), request("globex", 2)
    own_name = replace(shared.adapters[0], name="acme/a", digest="sha256:acme")
    foreign_name = replace(shared.adapters[0], digest="sha256:acme")
    requests = (replace(shared, adapters=(own_name,)), replace(same, adapters=(foreign_name,)), request("acme"))
    slot = LiveSlot(0, "acme/a", "acme", "sha256:acme", 35, 3, False)
    hub = hub_over(ScriptedEngine(look("acme", requests=requests, slots=(slot,))))
    async with hub.viewing("acme", 10) as viewer, hub.viewing(None, 10) as admin:
        assert [one["num_rows"] for one in (await next_frame(viewer))["slots"]] == [2]  # its own, and who may use it
        assert [one["num_rows"] for one in (await next_frame(admin))["slots"]] == [3]


async def test_rows_of_others_on_an_adapter_that_is_shared_with_a_tenant_are_not_told() -> None:
    theirs, ours = request("globex"), request("acme")
    requests = (theirs, request("globex", 2), replace(ours, adapters=theirs.adapters))
    slot = LiveSlot(0, "globex/a", "globex", "sha256:globex", 35, 3, False)
    hub = hub_over(ScriptedEngine(look("acme", requests=requests, slots=(slot,))))
    async with hub.viewing("acme", 10) as sharer, hub.viewing("globex", 10) as owner:
        shown = [(await next_frame(viewer))["slots"] for viewer in (sharer, owner)]
    assert [[(slot["name"], slot["num_rows"]) for slot in slots] for slots in shown] == [
        [("globex/a", 1)],
        [("globex/a", 3)],
    ]


async def test_a_slot_that_two_tenants_share_has_the_names_of_both_and_to_each_its_own() -> None:
    """Both registered the same bytes: whoever came first brought them onto the device."""
    theirs, ours = request("globex"), request("acme")
    same = replace(ours.adapters[0], name="acme/b", version=7, digest="sha256:globex")
    requests = (theirs, ours, replace(request("acme", 2), adapters=(same,)), request("globex", 3))
    slots = (
        LiveSlot(0, "globex/a", "globex", "sha256:globex", 35, 3, True, 2),
        LiveSlot(1, "acme/a", "acme", "sha256:acme", 35, 1, False, 4),
    )
    hub = hub_over(ScriptedEngine(look("acme", requests=requests, slots=slots)))
    async with hub.viewing("acme", 10) as own, hub.viewing("globex", 10) as other, hub.viewing(None, 10) as admin:
        frames = [(await next_frame(viewer))["slots"] for viewer in (own, other, admin)]
    wanted = ("name", "version", "also", "num_rows", "pinned", "tenant")
    assert [[tuple(slot[name] for name in wanted) for slot in shown] for shown in frames] == [
        [("acme/b", 7, [], 1, False, "acme"), ("acme/a", 4, [], 1, False, "acme")],
        [("globex/a", 2, [], 2, True, "globex")],
        [("globex/a", 2, ["acme/b"], 3, True, "globex"), ("acme/a", 4, [], 1, False, "acme")],
    ]


async def test_a_tenant_made_again_is_shown_nothing_of_the_one_before() -> None:
    """The former's request still runs, and another one has just ended; they arrived at 1000."""
    ended = request("acme", 2, "finished", first_token_ms=5.0, reason="stop")
    engine = ScriptedEngine(look("acme", ended=(ended,)))
    hub = hub_over(engine, owns=lambda tenant, since, name, digest: since < 2000)
    async with hub.viewing("acme", 10, 500.0) as former, hub.viewing("acme", 10, 2000.0) as viewer:
        engine.steps = [step(1, "acme")]
        frame = await next_frame(viewer)
        assert [frame[part] for part in ("requests", "steps", "slots", "moves", "loading")] == [[]] * 5
        assert (frame["queue"], frame["num_running"], frame["num_waiting"]) == ({}, 0, 0)
        assert frame["tokens_per_second"] == {"prompt": 0, "output": 0}
        assert frame["latency"]["first_token_ms"] == {"p50": None, "p95": None}
        frame = await next_frame(former)
        assert all(frame[part] for part in ("requests", "steps", "slots", "moves", "loading", "queue"))
    assert {asked[1] for asked in engine.asked} <= {(), ("acme",)}


async def test_a_tenant_made_again_is_shown_its_own_requests_beside_those_of_the_one_before() -> None:
    """Both use the same bytes: those in the slot bear the former's name, and the new tenant has another for them."""
    old = request("acme")
    use = replace(old.adapters[0], name="acme/new", version=2)
    new = [
        replace(request("acme", number, state), adapters=(use,), arrived=3000.0)
        for number, state in ((2, "running"), (3, "waiting"))
    ]
    engine = ScriptedEngine(look("acme", requests=(old, *new), queue={"acme": LiveCount(1, 2)}))
    hub = hub_over(engine, owns=lambda tenant, since, name, digest: name == "acme/new")
    async with hub.viewing("acme", 10, 2000.0) as viewer:
        frame = await next_frame(viewer)
    assert [one["id"] for one in frame["requests"]] == ["acme-r2", "acme-r3"]
    assert frame["queue"] == {"acme": {"waiting": 1, "running": 1}}
    assert [(slot["name"], slot["version"], slot["num_rows"]) for slot in frame["slots"]] == [("acme/new", 2, 1)]


async def test_whoever_sees_all_is_shown_all() -> None:
    engine = ScriptedEngine(look("acme", "globex"))
    engine.steps = [step(1, "acme", "globex")]
    hub = hub_over(engine, num_restarts=lambda: 3)
    async with hub.viewing(None, 10) as viewer:
        frame = await next_frame(viewer)
    assert {one["tenant"] for one in (*frame["requests"], *frame["slots"], *frame["moves"])} == {"acme", "globex"}
    assert frame["moves"][0]["from"] == "disk"
    assert frame["blocks"] == {"total": 10, "free": 6, "cached": 3}
    assert frame["limits"]["max_num_seqs"] == 64
    assert (frame["preemptions"], frame["restarts"], frame["max_loras"]) == (0, 3, 4)
    assert set(frame["tiers"]) == {"device", "host", "disk"}


async def test_tiers_come_once_a_second() -> None:
    engine = ScriptedEngine(look("acme"))
    hub = hub_over(engine)
    frames = []
    async with hub.viewing(None, 10) as viewer:
        for number in range(16):
            engine.steps.append(step(number, "acme"))
            frames.append(await next_frame(viewer))
    with_tiers = [frame["number"] for frame in frames if "tiers" in frame]
    assert 2 <= len(with_tiers) <= 4
    assert with_tiers[0] == 1
    assert 1 <= sum(asked[2] for asked in engine.asked) <= 4


async def test_replicas_are_shown_together() -> None:
    engine = ScriptedEngine(look("acme"), replicas=("one", "two"))
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer:
        frame = await next_frame(viewer)
    assert frame["queue"] == {"acme": {"waiting": 0, "running": 2}}
    assert frame["blocks"] == {"total": 20, "free": 12, "cached": 6}
    assert frame["tiers"]["device"]["bytes"] == 140
    assert (frame["max_loras"], frame["loading"]) == (4, ["sha256:acme-b"])


async def test_a_replica_that_answers_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_STALE_SECONDS", 0.3)
    engine = ScriptedEngine(look("acme"), replicas=("one", "two"))
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)
        engine.replicas = ("one",)
        frame = await next_frame(viewer)
        assert frame["num_running"] == 2, "it may be in a long step"
        async with asyncio.timeout(60):
            while (await next_frame(viewer))["num_running"] != 1:
                engine.steps.append(step(1, "acme"))
        engine.replicas = ()
        async with asyncio.timeout(60):
            while (await next_frame(viewer))["num_running"]:
                pass
        async with hub.viewing(None, 10) as newcomer:
            await next_frame(newcomer)


async def test_a_fleet_in_a_long_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(look("acme"), replicas=())
    hub = hub_over(engine)
    with pytest.raises(EngineLostError, match="No engine answers"):
        async with hub.viewing(None, 10):
            pass
    asking = asyncio.ensure_future(hub.viewing(None, 10).__aenter__())
    while len(engine.asked) < 12:
        await asyncio.sleep(0)
    engine.replicas = ("one",)
    assert (await next_frame(await asking))["num_running"] == 1
    hub.close("over")


async def test_tokens_and_times_are_those_of_the_scope() -> None:
    now = time.time()
    engine = ScriptedEngine(look("acme", "globex", requests=(request("acme", first_token_ms=120.0),)))
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer, hub.viewing("acme", 10) as own:
        engine.steps = [
            step(number, "acme", *["globex"] * (number % 2), at=now - 1.2 + number / 10) for number in range(10)
        ]
        frame, scoped = await next_frame(viewer), await next_frame(own)
    assert scoped["tokens_per_second"] == {"prompt": 0, "output": pytest.approx(8, abs=1)}
    assert frame["tokens_per_second"]["output"] > scoped["tokens_per_second"]["output"]
    assert scoped["latency"]["first_token_ms"]["p95"] == pytest.approx(120, rel=0.06)
    assert scoped["latency"]["inter_token_ms"]["p50"] == pytest.approx(100, rel=0.06)
    assert frame["latency"]["inter_token_ms"]["p95"] == pytest.approx(200, rel=0.06)


async def test_a_lost_engine_ends_the_streams_in_words() -> None:
    engine = ScriptedEngine()
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)
        engine.error = EngineLostError("The engine stopped; try again.")
        assert await next_event(viewer) == ("bye", {"reason": "The engine stopped; try again."})
        assert viewer.is_over
    with pytest.raises(EngineLostError):
        async with hub.viewing(None, 10):
            pass
    engine.error = None
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)


async def test_a_bug_ends_the_streams_in_words(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    hub = hub_over(engine)
    async with hub.viewing(None, 10) as viewer:
        await next_frame(viewer)
        engine.error = RuntimeError("a secret")
        assert await next_event(viewer) == ("bye", {"reason": "The live view failed; open it again."})
    assert "the live view failed" in caplog.text


async def test_without_an_engine_nobody_is_let_in() -> None:
    engine = ScriptedEngine(error=NotReadyError("The engine is being started."))
    hub = hub_over(engine)
    for _ in range(2):
        with pytest.raises(NotReadyError):
            async with hub.viewing(None, 5):
                pass
    assert not hub._viewers


async def test_the_servers_end_ends_the_streams() -> None:
    reasons: list[str] = []
    hub = hub_over(ScriptedEngine(), ending=lambda: reasons[0] if reasons else None)
    async with hub.viewing(None, 1) as viewer:
        await next_frame(viewer)
        reasons.append("The server is shutting down.")
        before = time.monotonic()
        assert await next_event(viewer) == ("bye", {"reason": "The server is shutting down."})
        assert time.monotonic() - before < 0.8


async def test_no_tenant_takes_the_places_of_others() -> None:
    hub = hub_over(ScriptedEngine())
    async with AsyncExitStack() as stack:
        for _ in range(MAX_OF_TENANT):
            await stack.enter_async_context(hub.viewing("acme", 1))
        with pytest.raises(CapacityError, match="16 live views are open"):
            async with hub.viewing("acme", 1):
                pass
        for scope in ("globex", None):
            await next_frame(await stack.enter_async_context(hub.viewing(scope, 1)))
    async with hub.viewing("acme", 1) as viewer:
        await next_frame(viewer)


async def test_tenants_together_leave_the_admin_its_places() -> None:
    hub = hub_over(ScriptedEngine())
    async with AsyncExitStack() as stack:
        for number in range(MAX_OF_TENANTS):
            await stack.enter_async_context(hub.viewing(f"tenant{number // MAX_OF_TENANT}", 1))
        with pytest.raises(CapacityError, match="48 live views are open"):
            async with hub.viewing("one-more", 1):
                pass
        admins = [hub.viewing(None, 1) for _ in range(MAX_VIEWERS - MAX_OF_TENANTS)]
        viewers = [await stack.enter_async_context(admin) for admin in admins]
        await asyncio.gather(*(next_frame(viewer) for viewer in viewers))


async def test_viewers_are_bounded() -> None:
    hub = hub_over(ScriptedEngine())
    async with AsyncExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            await stack.enter_async_context(hub.viewing(None, 1))
        with pytest.raises(CapacityError, match="64 live views are open"):
            async with hub.viewing(None, 1):
                pass
    async with hub.viewing(None, 1) as viewer:
        await next_frame(viewer)
