"""Faults of everything around the step: clocks, threads, overload, the web's own handlers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lora_serve.adapters.registration import registry
from lora_serve.server.admin import adapters
from lora_serve.text.tokenizer import TextModel
from tests.canary.asking import Canaries
from tests.canary.house import ADMIN, INSIDE, House
from tests.canary.questions import BASE, World
from tests.canary.watch import watching
from tests.faults.injecting import ask, error_of, ref_of, register_victim, settle
from tests.hostile.sending import as_admin, call
from tests.oracle import save_adapter

pytestmark = pytest.mark.engines("thread", nightly=["process"])


@pytest.fixture(scope="module")
def house_settings() -> dict[str, Any]:
    return {"max_queue": 24, "max_tenant_queue": 20}


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


@pytest.mark.many(2)
@pytest.mark.parametrize("jump", [86_400.0, -86_400.0, -1.8e9, 4e9], ids=["a_day_on", "a_day_back", "1970", "2150"])
def test_clock_that_jumps_changes_no_answer(
    house: House, canaries: Canaries, folder: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    sound = time.time
    with watching(house, canaries):
        monkeypatch.setattr(time, "time", lambda: max(0.0, sound() + jump))
        register_victim(house, folder)
        assert ask(house, timeout_ms=20_000).status == 200
        assert as_admin(house, "GET", "/admin/adapters").status == 200
        assert as_admin(house, "DELETE", "/admin/adapters/victim/x").status == 200


async def _flood(house: House, num_requests: int, model: Callable[[int], str]) -> list[int]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(house.url, connector=connector, headers=ADMIN) as session:

        async def one(number: int) -> int:
            body = {"model": model(number), "prompt": "flood", "max_tokens": 12, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    assert int(response.headers["Retry-After"]) >= 1
                return response.status

        return await asyncio.gather(*(one(number) for number in range(num_requests)))


def test_ten_times_what_it_can_do_is_refused_early_and_the_rest_is_right(house: House, canaries: Canaries) -> None:
    names = [BASE, *(question.model for question in canaries.questions)]
    with watching(house, canaries, may_refuse=True) as watch:
        statuses = asyncio.run(_flood(house, 400, lambda number: names[number % len(names)]))
    assert set(statuses) <= {200, 429, 503}
    assert statuses.count(200) >= 16
    assert {429, 503} & set(statuses), "the flood was no flood"
    assert watch.verdict.num_right >= 12


def test_bug_in_a_handler_is_that_requests_500_and_tells_nothing(
    house: House, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("injected: /secret/path and a password")

    monkeypatch.setattr(adapters, "_matching", broken)
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected"]
        reply = as_admin(house, "GET", "/admin/adapters")
    assert reply.status == 500
    assert b"secret" not in reply.body
    assert reply.headers["X-Request-Id"] in error_of(reply)["message"]


def test_bug_in_an_answers_way_out_ends_that_answer_only(
    house: House, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = TextModel.encode

    def encode(self: TextModel, text: str, add_special_tokens: bool = True) -> Any:
        if "boom" in text:
            raise RuntimeError("injected")
        return sound(self, text, add_special_tokens)

    monkeypatch.setattr(TextModel, "encode", encode)
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected"]
        reply = ask(house, BASE, prompt="boom")
    assert reply.status == 500
    assert reply.headers["X-Request-Id"] in error_of(reply)["message"]


@pytest.mark.parametrize("end", [SystemExit("injected"), KeyboardInterrupt("injected")], ids=repr)
def test_end_of_the_registrys_thread_is_that_operations_500_and_the_next_ones_work(
    house: House, canaries: Canaries, folder: Path, end: BaseException
) -> None:
    def ending(*_: object, **__: object) -> Any:
        raise end

    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected", "request"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "read_artifact", ending)
            body = {"id": "victim/x", "source": str(folder)}
            assert as_admin(house, "POST", "/admin/adapters", body).status == 500
        register_victim(house, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(house.services.registry, "delete", ending)
            assert as_admin(house, "DELETE", "/admin/adapters/victim/x").status == 500
        assert ask(house).status == 200
        assert as_admin(house, "DELETE", "/admin/adapters/victim/x").status == 200


def test_lower_maximum_of_device_bytes_holds_at_once_and_changes_no_answer(house: House, canaries: Canaries) -> None:
    sizes = [ref_of(house, name).num_bytes for name in ("acme/a", "acme/b")]

    def set_maximum(device_bytes_max: int | None) -> None:
        body = {"quota": {"device_bytes_max": device_bytes_max}}
        assert as_admin(house, "PATCH", "/admin/tenants/acme", body).status == 200

    def bytes_on_device() -> int:
        slots = house.on_loop(house.services.client.stats()).slots
        return sum(slot.num_bytes for slot in slots if slot.name.startswith("acme/"))

    # four free slots: where the second has to push another adapter out, the cheapest to load goes, maybe the first
    for name in house.services.catalog.snapshot.entries:
        assert as_admin(house, "POST", f"/admin/adapters/{name}/evict").status == 200
    for name in ("acme/a", "acme/b"):
        assert as_admin(house, "POST", f"/admin/adapters/{name}/prefetch").status == 200
    assert bytes_on_device() == sum(sizes)
    with watching(house, canaries):
        set_maximum(max(sizes))
        settle(lambda: bytes_on_device() <= max(sizes))
        assert [bytes_on_device() <= max(sizes) for _ in range(50)] == [True] * 50
    set_maximum(None)
    with watching(house, canaries):
        pass


def test_threads_beside_the_event_loop_that_are_all_busy_delay_no_answer(house: House, canaries: Canaries) -> None:
    gate = threading.Event()

    async def block() -> None:
        for _ in range(16):
            asyncio.get_running_loop().run_in_executor(None, gate.wait, 120)

    house.on_loop(block())
    try:
        with watching(house, canaries):
            assert ask(house, BASE).status == 200
            gate.set()
    finally:
        gate.set()


def test_registry_thread_that_meets_a_bug_registers_the_next_one(
    house: House, canaries: Canaries, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [RuntimeError("injected"), MemoryError("injected")]
    sound = house.services.registry.__class__.register

    def register(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return sound(*arguments)

    monkeypatch.setattr(house.services.registry.__class__, "register", register)
    body = {"id": "victim/x", "source": str(folder)}
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected"]
        assert [as_admin(house, "POST", "/admin/adapters", body).status for _ in range(2)] == [503, 500]
        assert as_admin(house, "POST", "/admin/adapters", body).status == 201
        assert as_admin(house, "DELETE", "/admin/adapters/victim/x").status == 200


@pytest.mark.engines("thread", alone=INSIDE)
def test_probe_that_fails_refuses_the_adapter_and_leaves_nothing(
    house: House, canaries: Canaries, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("injected")

    before = sorted((house.store / "blobs").iterdir())
    monkeypatch.setattr(house.parts.runner.__class__, "smoke_test", broken)
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected", "Command", "request"]
        answer = as_admin(house, "POST", "/admin/adapters", {"id": "victim/x", "source": str(folder)})
        assert answer.status == 422
    monkeypatch.undo()
    assert sorted((house.store / "blobs").iterdir()) == before


def test_engine_figures_that_cannot_be_had_fail_no_probe(
    house: House, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("injected")

    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(house.services.store.__class__, "tiers", broken)
            for path in ("/health", "/ready"):
                assert call(house, "GET", path).status == 200
            assert call(house, "GET", "/metrics").status in (200, 500, 503)
        assert call(house, "GET", "/metrics").status == 200


def test_cancelled_requests_in_every_state_leave_nothing(house: House, canaries: Canaries) -> None:
    """Deadlines of 1 to 40 ms, which end requests at their arrival, in the queue, during a load and in their steps."""
    with watching(house, canaries, may_refuse=True):
        statuses = [
            ask(house, f"{tenant}/b", timeout_ms=milliseconds, max_tokens=40).status
            for milliseconds in (1, 2, 4, 8, 15, 25, 40)
            for tenant in ("acme", "globex", "hooli")
        ]
    assert set(statuses) <= {200, 429, 503, 504}


def test_two_of_the_same_registration_at_once_are_one(house: House, canaries: Canaries, folder: Path) -> None:
    statuses: list[int] = []

    def register() -> None:
        statuses.append(as_admin(house, "POST", "/admin/adapters", {"id": "victim/x", "source": str(folder)}).status)

    with watching(house, canaries):
        threads = [threading.Thread(target=register) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * 7 + [201]
        assert as_admin(house, "DELETE", "/admin/adapters/victim/x").status == 200
        settle(lambda: not list((house.store / "tmp").iterdir()))
