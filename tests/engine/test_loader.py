from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InternalError,
    InvalidAdapterError,
    LoadHangsError,
    LoraServeError,
)
from lora_serve.core.figures import Loaded, LoadTimes
from lora_serve.engine import watchdog_pool
from lora_serve.engine.loader import Loader, LoadFinished, Pace

TIMES = LoadTimes("disk", 0.1, 0.2, 0.3, 0.4)


def ref(digest: str) -> AdapterRef:
    return AdapterRef("tenant", f"tenant/{digest}", 1, digest, 8, 100)


Started = Callable[..., Loader[str]]


@pytest.fixture
def posted() -> queue.Queue[LoadFinished[str]]:
    return queue.Queue()


@pytest.fixture
def started(posted: queue.Queue[LoadFinished[str]]) -> Iterator[Started]:
    loaders: list[Loader[str]] = []

    def start(fetch: Callable[[AdapterRef], str], num_threads: int = 2, **options: Any) -> Loader[str]:
        loaders.append(Loader(lambda adapter: Loaded(fetch(adapter), TIMES, 128), posted.put, num_threads, **options))
        return loaders[-1]

    yield start
    for loader in loaders:
        loader.close()


def test_posts_what_was_fetched(started: Started, posted: queue.Queue[LoadFinished[str]]) -> None:
    started(lambda adapter: adapter.name).submit(ref("d"))
    message = posted.get(timeout=5)
    assert (message.digest, message.adapter, message.error) == ("d", "tenant/d", None)
    assert message.seconds >= 0
    assert (message.times, message.extra_bytes) == (TIMES, 128)


def test_many_waiters_share_one_load(started: Started, posted: queue.Queue[LoadFinished[str]]) -> None:
    release = threading.Event()
    calls = []

    def fetch(adapter: AdapterRef) -> str:
        calls.append(adapter.digest)
        release.wait(5)
        return "weights"

    loader = started(fetch)
    for _ in range(50):
        loader.submit(ref("d"))
    release.set()
    posted.get(timeout=5)
    loader.close()
    assert calls == ["d"]
    assert posted.empty()


def test_failed_load_can_be_asked_for_again_by_whoever_reads_the_message() -> None:
    posted: queue.Queue[LoadFinished[str]] = queue.Queue()
    results = iter([OSError("disk"), None])

    def fetch(adapter: AdapterRef) -> Loaded[str]:
        if (error := next(results)) is not None:
            raise error
        return Loaded("weights", TIMES)

    def post(message: LoadFinished[str]) -> None:
        posted.put(message)
        if message.error is not None:
            loader.submit(ref("d"))  # from inside the post: the digest must be free again by now

    loader = Loader(fetch, post)
    loader.submit(ref("d"))
    assert [posted.get(timeout=5).adapter for _ in range(2)] == [None, "weights"]
    loader.close()


@pytest.mark.parametrize(
    ("raised", "posted_as"),
    [
        (InvalidAdapterError(["corrupt"]), InvalidAdapterError),
        (FileNotFoundError("/secret/path"), AdapterUnavailableError),
        (MemoryError(), AdapterUnavailableError),
        (ZeroDivisionError("our bug"), InternalError),
    ],
)
def test_every_failure_is_posted_as_one_of_our_errors_without_paths(
    started: Started, posted: queue.Queue[LoadFinished[str]], raised: Exception, posted_as: type[LoraServeError]
) -> None:
    def fetch(adapter: AdapterRef) -> str:
        raise raised

    started(fetch).submit(ref("d"))
    message = posted.get(timeout=5)
    assert type(message.error) is posted_as
    assert message.adapter is None
    assert "secret" not in str(message.error)


def test_slow_load_does_not_hold_up_another(started: Started, posted: queue.Queue[LoadFinished[str]]) -> None:
    release = threading.Event()

    def fetch(adapter: AdapterRef) -> str:
        if adapter.digest == "slow":
            release.wait(5)
        return adapter.digest

    loader = started(fetch)
    loader.submit(ref("slow"))
    loader.submit(ref("fast"))
    assert posted.get(timeout=5).digest == "fast"
    release.set()
    assert posted.get(timeout=5).digest == "slow"


def test_what_was_posted_is_kept_after_the_post(posted: queue.Queue[LoadFinished[str]]) -> None:
    events: queue.Queue[str] = queue.Queue()
    loader = Loader(
        lambda adapter: Loaded("weights", TIMES),
        lambda message: events.put("post"),
        keep=lambda adapter, value: events.put(f"keep {value}"),
    )
    loader.submit(ref("d"))
    assert [events.get(timeout=5) for _ in range(2)] == ["post", "keep weights"]
    loader.close()


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), SystemExit("bug")], ids=repr)
def test_load_that_cannot_be_kept_costs_no_thread(
    started: Started, posted: queue.Queue[LoadFinished[str]], error: BaseException
) -> None:
    def keep(adapter: AdapterRef, value: str) -> None:
        raise error

    loader = started(lambda adapter: adapter.digest, num_threads=1, keep=keep)
    for digest in ("d1", "d2", "d3"):
        loader.submit(ref(digest))
        assert posted.get(timeout=5).adapter == digest
    loader.close()
    assert not loader.is_busy


def test_failed_load_keeps_nothing(posted: queue.Queue[LoadFinished[str]]) -> None:
    kept: list[str] = []

    def fetch(adapter: AdapterRef) -> Loaded[str]:
        raise OSError("disk")

    loader = Loader(fetch, posted.put, keep=lambda adapter, value: kept.append(value))
    loader.submit(ref("d"))
    loader.close()
    assert kept == []


def test_loads_rest_by_their_share_of_a_core_only_while_others_run() -> None:
    busy = Pace(lambda: True, share=0.25)
    assert busy.pause(0.02, num_threads=1) == pytest.approx(0.06)  # 0.02 of 0.08 seconds
    assert busy.pause(0.02, num_threads=2) == pytest.approx(0.14)  # two threads: an eighth each
    assert busy.pause(10.0, num_threads=2) == 2.0
    assert Pace(lambda: False, share=0.25).pause(0.02, num_threads=2) == 0.0


def test_closing_does_not_sit_out_a_rest(posted: queue.Queue[LoadFinished[str]]) -> None:
    asked = threading.Event()

    class Endless(Pace):
        def pause(self, used: float, num_threads: int) -> float:
            asked.set()
            return 3600.0

    loader = Loader(lambda adapter: Loaded("weights", TIMES), posted.put, pace=Endless(lambda: True))
    loader.submit(ref("d"))
    assert posted.get(timeout=5).adapter == "weights"  # posted before the rest
    assert asked.wait(5)
    loader.close()


def test_rest_ends_as_soon_as_nobody_else_runs(posted: queue.Queue[LoadFinished[str]]) -> None:
    busy, looked = threading.Event(), threading.Event()
    busy.set()

    def is_busy() -> bool:
        looked.set()
        return busy.is_set()

    class Endless(Pace):
        def pause(self, used: float, num_threads: int) -> float:
            return 3600.0

    loader = Loader(lambda adapter: Loaded("weights", TIMES), posted.put, 1, pace=Endless(is_busy))
    loader.submit(ref("first"))
    assert posted.get(timeout=5).digest == "first"
    assert looked.wait(5)
    loader.submit(ref("second"))
    busy.clear()
    assert posted.get(timeout=5).digest == "second"
    loader.close()


def test_paced_loads_give_way_to_every_other_thread(posted: queue.Queue[LoadFinished[str]]) -> None:
    def fetch(adapter: AdapterRef) -> Loaded[str]:
        return Loaded(str(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), TIMES)

    loader = Loader(fetch, posted.put, 1, pace=Pace(lambda: False))
    loader.submit(ref("d"))
    assert posted.get(timeout=5).adapter == "19"
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
    loader.close()


def test_load_for_which_there_is_no_thread_fails_and_can_be_tried_again(
    started: Started, posted: queue.Queue[LoadFinished[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = started(lambda adapter: adapter.name)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        loader.submit(ref("d"))
    assert isinstance(posted.get(timeout=60).error, AdapterUnavailableError)
    loader.submit(ref("d"))
    assert posted.get(timeout=60).adapter == "tenant/d"


def test_close_does_not_wait_for_ever_for_a_load_that_hangs(
    started: Started, posted: queue.Queue[LoadFinished[str]]
) -> None:
    release, begun = threading.Event(), threading.Event()

    def fetch(adapter: AdapterRef) -> str:
        begun.set()
        release.wait(60)
        return "weights"

    loader = started(fetch)
    loader.submit(ref("d"))
    assert begun.wait(60)
    loader.close(0.01)
    assert posted.empty()
    release.set()
    loader.close()
    assert posted.get(timeout=60).adapter == "weights"


class HangingStore:
    """Loads of digests that begin with "hung" do not come back before `release`."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun: queue.Queue[str] = queue.Queue()

    def fetch(self, adapter: AdapterRef) -> str:
        self.begun.put(adapter.digest)
        if adapter.digest.startswith("hung"):
            self.release.wait(60)
        return adapter.digest


@pytest.fixture
def store() -> Iterator[HangingStore]:
    made = HangingStore()
    yield made
    made.release.set()


def test_loads_that_hang_leave_their_threads_places_to_others(
    started: Started, posted: queue.Queue[LoadFinished[str]], store: HangingStore, caplog: pytest.LogCaptureFixture
) -> None:
    loader = started(store.fetch, num_threads=2, timeout=0.05)
    loader.submit(ref("hung 1"))
    loader.submit(ref("hung 2"))
    loader.submit(ref("sound"))
    answers = {message.digest: message for message in (posted.get(timeout=60) for _ in range(3))}
    assert answers["sound"].adapter == "sound"
    for digest in ("hung 1", "hung 2"):
        assert isinstance(answers[digest].error, LoadHangsError)
    assert caplog.text.count("hangs for") == 1


def test_digest_whose_load_hangs_is_refused_until_it_is_back_and_then_loaded_anew(
    started: Started, posted: queue.Queue[LoadFinished[str]], store: HangingStore
) -> None:
    back = threading.Event()
    loader = started(store.fetch, num_threads=1, timeout=0.05, keep=lambda adapter, value: back.set())
    loader.submit(ref("hung"))
    assert isinstance(posted.get(timeout=60).error, LoadHangsError)
    for _ in range(3):
        loader.submit(ref("hung"))
        assert isinstance(posted.get(timeout=60).error, LoadHangsError)
    assert store.begun.qsize() == 1  # no thread for any of them
    store.release.set()
    assert back.wait(60)
    answer = None
    while answer is None or answer.adapter is None:  # its thread may be just about to say that it is back
        loader.submit(ref("hung"))
        answer = posted.get(timeout=60)
    assert store.begun.qsize() == 2  # what came too late was not posted
    assert posted.empty()


def test_more_hung_threads_than_the_bound_refuse_every_load_until_one_is_back(
    started: Started, posted: queue.Queue[LoadFinished[str]], store: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_pool, "MAX_HUNG", 1)
    loader = started(store.fetch, num_threads=1, timeout=0.05)
    loader.submit(ref("hung 1"))
    loader.submit(ref("hung 2"))
    loader.submit(ref("waits"))  # behind the second, for which there is the last thread
    errors = [posted.get(timeout=60).error for _ in range(3)]
    assert [type(error) for error in errors] == [LoadHangsError] * 3
    loader.submit(ref("sound"))
    assert isinstance(posted.get(timeout=60).error, AdapterUnavailableError)
    store.release.set()
    answer = None
    while answer is None or answer.adapter is None:
        loader.submit(ref("sound"))
        answer = posted.get(timeout=60)
    assert answer.adapter == "sound"


def test_work_after_the_load_that_hangs_keeps_nobody_waiting(
    posted: queue.Queue[LoadFinished[str]], store: HangingStore
) -> None:
    loader = Loader(
        lambda adapter: Loaded("weights", TIMES),
        posted.put,
        1,
        keep=lambda adapter, value: store.fetch(adapter) and None,
        timeout=0.05,
    )
    for digest in ("hung", "sound"):
        loader.submit(ref(digest))
        assert posted.get(timeout=60).adapter == "weights"
    store.release.set()
    loader.close()


def test_loads_of_many_tenants_take_turns(started: Started, posted: queue.Queue[LoadFinished[str]]) -> None:
    gate, begun = threading.Event(), threading.Event()

    def fetch(adapter: AdapterRef) -> str:
        begun.set()
        gate.wait(60)
        return adapter.digest

    loader = started(fetch, num_threads=1)
    loader.submit(ref("first"))
    assert begun.wait(60)
    for tenant, number in (("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1)):
        loader.submit(AdapterRef(tenant, f"{tenant}/{number}", 1, f"{tenant}{number}", 8, 100))
    gate.set()
    order = [posted.get(timeout=60).digest for _ in range(6)]
    assert order == ["first", "a1", "b1", "c1", "a2", "a3"]
