"""Hot adapters over a restart: what is noted, what is warmed, and what a broken file does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import VersionEntry
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.app.warm_set import FILE_NAME, WarmSet, WarmSetKeeper, read_warm_set, write_warm_set
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import Prefetch
from lora_serve.core.stats import AdapterCounters, EngineStats, SlotInfo
from lora_serve.server.lifecycle import EngineHistory
from tests.mock_engine import MockEngineClient

BYTES = 10


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = open_catalog(tmp_path)
    for name in "abcdef":
        Registration(id=name).commit(catalog.ledger, VersionEntry(0, f"sha256:{name * 64}", 4, BYTES, {}, "test", 0.0))
    yield catalog
    catalog.close()


@pytest.fixture
async def engine() -> MockEngineClient:
    engine = MockEngineClient(100)
    await engine.start()
    return engine


def keeper(engine: MockEngineClient, catalog: Catalog, store: Path, **limits: int) -> WarmSetKeeper:
    fields: dict[str, Any] = {"max_loras": 4, "adapter_host_memory": 1000, **limits}
    config = AdapterConfig(store=store, max_lora_rank=8, max_upload_size=1000, **fields)
    return WarmSetKeeper(engine, catalog, config)


def digests(text: str) -> tuple[str, ...]:
    return tuple(f"sha256:{name * 64}" for name in text)


def warmed(engine: MockEngineClient) -> list[tuple[str, str]]:
    return [(command.adapter.name, command.to) for command in engine.commands if isinstance(command, Prefetch)]


async def run_once(keeper: WarmSetKeeper) -> None:
    """A life of a server, long enough to warm everything."""
    await keeper.warm_device()
    async with keeper.keeping():
        while not keeper._is_warm:
            await asyncio.sleep(0)


def test_what_was_written_is_read_again_and_no_other_file_is_left(tmp_path: Path) -> None:
    warm_set = WarmSet(digests("ab"), digests("cd"))
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("x")))
    write_warm_set(tmp_path / FILE_NAME, warm_set)
    assert read_warm_set(tmp_path / FILE_NAME) == warm_set
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"adapters": 3}', '{"adapters": [3]}', '{"adapters": [{"digest": "x"}]}', "[" * 100_000,
        '{"adapters": [{"digest": 3, "tier": "host"}]}', '{"adapters": [{"digest": "x", "tier": "moon"}]}', "\udcff",
    ],
)  # fmt: skip
def test_broken_file_is_ignored_with_a_line_in_the_log(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(text.encode(errors="surrogateescape"))
    assert read_warm_set(tmp_path / FILE_NAME) == WarmSet()
    assert FILE_NAME in caplog.text


def test_first_start_has_nothing_to_warm_and_nothing_to_complain_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_warm_set(tmp_path / FILE_NAME) == WarmSet()
    assert not caplog.text


async def test_device_is_warmed_first_and_host_memory_after_it(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog
) -> None:
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("ba"), digests("dc")))
    kept = keeper(engine, catalog, tmp_path)
    await kept.warm_device()
    assert warmed(engine) == [("b", "device"), ("a", "device")]
    await run_once(kept)
    assert warmed(engine)[-2:] == [("d", "host"), ("c", "host")]


async def test_deleted_adapters_are_left_out(tmp_path: Path, engine: MockEngineClient, catalog: Catalog) -> None:
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("axb"), digests("yc")))
    catalog.remove("b")
    await run_once(keeper(engine, catalog, tmp_path))
    assert warmed(engine) == [("a", "device"), ("c", "host")]


@pytest.mark.parametrize(
    ("limits", "device", "host"),
    [
        ({"max_loras": 1}, "a", "bcdef"),
        ({"adapter_memory": 2 * BYTES}, "ab", "cdef"),
        ({"adapter_host_memory": 4 * BYTES}, "abc", "d"),
        ({"max_cpu_loras": 2}, "abc", ""),
    ],
)
async def test_no_more_is_warmed_than_there_is_room_for_now(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog, limits: dict[str, int], device: str, host: str
) -> None:
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("abc"), digests("def")))
    await run_once(keeper(engine, catalog, tmp_path, **limits))
    assert warmed(engine) == [*((name, "device") for name in device), *((name, "host") for name in host)]


async def test_pinned_adapters_keep_their_places(tmp_path: Path, engine: MockEngineClient, catalog: Catalog) -> None:
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("bac")))
    catalog.set_pinned("b", True)
    await keeper(engine, catalog, tmp_path, max_loras=2).warm_device()
    assert warmed(engine) == [("a", "device")]


async def test_fleet_has_room_for_what_its_replicas_hold_together(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog
) -> None:
    engine.replicas = ("r1", "r2", "r3")
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("bacd"), digests("ef")))
    catalog.set_pinned("b", True)
    await run_once(keeper(engine, catalog, tmp_path, max_loras=2, max_cpu_loras=1))
    assert warmed(engine) == [("a", "device"), ("c", "device"), ("d", "device")]


async def test_adapter_that_cannot_be_loaded_does_not_stop_the_start(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("a"), digests("b")))
    engine.command_error = AdapterUnavailableError("the disk is gone")
    await run_once(keeper(engine, catalog, tmp_path))
    assert caplog.text.count("the disk is gone") == 2


async def test_slow_adapters_hold_up_the_start_for_a_bounded_time(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("a")))
    monkeypatch.setattr("lora_serve.app.warm_set.DEVICE_SECONDS", 0.01)
    never = asyncio.Event()

    async def stuck(command: object) -> None:
        await never.wait()

    monkeypatch.setattr(engine, "adapters", stuck)
    async with asyncio.timeout(10):
        await keeper(engine, catalog, tmp_path).warm_device()


async def test_what_is_hot_is_noted_at_the_end(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        await engine.adapters(Prefetch(catalog.entry(name).ref()))
    catalog.remove("b")
    with caplog.at_level(logging.WARNING):
        await run_once(keeper(engine, catalog, tmp_path))
    assert read_warm_set(tmp_path / FILE_NAME) == WarmSet(digests("ac"))
    assert not caplog.text


def test_the_most_asked_for_stands_first() -> None:
    slots = tuple(SlotInfo(index, 1, f"sha256:{name * 64}", name, 1, 0, False) for index, name in enumerate("abc", 1))
    uses = {
        "a": AdapterCounters(hits={"a": 2}), "b": AdapterCounters(hits={"b": 1}, misses={"b": 1, "x": 2}),
        "d": AdapterCounters(misses={"d": 1}),
    }  # fmt: skip
    adapters = {f"sha256:{name * 64}": counters for name, counters in uses.items()}
    stats = EngineStats(0, 0, (), (), 4, 1, 1, 1, 0, slots, digests("abde"), (), adapters=adapters)
    assert WarmSet.of(stats, frozenset(digests("abcde"))) == WarmSet(digests("bac"), digests("de"))


async def test_what_has_not_changed_is_not_written_again(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[WarmSet] = []
    monkeypatch.setattr("lora_serve.app.warm_set.write_warm_set", lambda path, warm_set: written.append(warm_set))
    kept = keeper(engine, catalog, tmp_path)
    for name in "aab":
        await engine.adapters(Prefetch(catalog.entry(name).ref()))
        await kept._note()
    assert written == [WarmSet(digests("a")), WarmSet(digests("ab"))]


async def test_it_is_noted_while_the_server_runs(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.app.warm_set.NOTE_SECONDS", 0.001)
    written: list[WarmSet] = []
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(path: Path, warm_set: WarmSet) -> None:
        written.append(warm_set)
        loop.call_soon_threadsafe(changed.set)

    monkeypatch.setattr("lora_serve.app.warm_set.write_warm_set", write)
    async with keeper(engine, catalog, tmp_path).keeping():
        for name in "ab":
            await engine.adapters(Prefetch(catalog.entry(name).ref()))
            async with asyncio.timeout(10):
                await changed.wait()
            changed.clear()
    assert written == [WarmSet(digests("a")), WarmSet(digests("ab"))]


async def test_noted_adapter_that_is_deleted_is_forgotten_at_once(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, written = asyncio.get_running_loop(), asyncio.Event()
    really_write = write_warm_set

    def write(path: Path, warm_set: WarmSet) -> None:
        really_write(path, warm_set)
        loop.call_soon_threadsafe(written.set)

    monkeypatch.setattr("lora_serve.app.warm_set.write_warm_set", write)
    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("a"), digests("b")))
    async with keeper(engine, catalog, tmp_path).keeping():
        async with asyncio.timeout(60):
            while not read_warm_set(tmp_path / FILE_NAME).device:
                await written.wait()
            for name in "ab":
                catalog.remove(name)
                while f"sha256:{name * 64}" in (tmp_path / FILE_NAME).read_text():
                    written.clear()
                    await written.wait()


async def test_run_that_ends_before_it_was_warm_does_not_forget_what_was_hot(
    tmp_path: Path, engine: MockEngineClient, catalog: Catalog
) -> None:
    before = WarmSet(digests("a"), digests("bc"))
    write_warm_set(tmp_path / FILE_NAME, before)
    async with keeper(engine, catalog, tmp_path).keeping():
        pass
    assert read_warm_set(tmp_path / FILE_NAME) == before
    assert json.loads((tmp_path / FILE_NAME).read_text())["adapters"][0] == {
        "digest": "sha256:" + "a" * 64,
        "tier": "device",
    }


async def test_warm_up_off_neither_warms_nor_notes(tmp_path: Path, engine: MockEngineClient, catalog: Catalog) -> None:
    from lora_serve.app import warm_up
    from lora_serve.core.settings import Settings

    write_warm_set(tmp_path / FILE_NAME, WarmSet(digests("a")))
    services = SimpleNamespace(client=engine, catalog=catalog, history=EngineHistory())
    for warmup in ("off", "auto"):
        settings = Settings(model="fake", store=tmp_path, warmup=warmup)
        async with await warm_up.hot_adapters(services, settings):
            pass
        assert warmed(engine) == ([] if warmup == "off" else [("a", "device")])
