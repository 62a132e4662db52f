"""The service of an engine's process, without a process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import ForgetStaged, FromEngine, Reply, Validate
from lora_serve.engine_host.service import EngineService
from tests.engine_host.fake_engine import FakeServed

SECONDS = 20.0


@pytest.fixture
def sent() -> queue.SimpleQueue[FromEngine]:
    return queue.SimpleQueue()


@pytest.fixture
def service(sent: queue.SimpleQueue[FromEngine]) -> Iterator[EngineService]:
    service = EngineService(FakeServed(), lambda messages: [sent.put(message) for message in messages] and None)
    yield service
    service.stop()


def validate(call_id: int) -> Validate:
    return Validate(call_id, folder=Path("/nowhere/at-all"), digest="", max_rank=None, allow_noop=False, seconds=1.0)


def test_without_a_thread_a_validation_is_refused_and_the_next_one_is_done(
    service: EngineService, sent: queue.SimpleQueue[FromEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps what it could start no thread for, and runs it later: it is answered once all the same."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        service.take(validate(1))
        service.take(ForgetStaged(""))
    refused = sent.get(timeout=SECONDS)
    assert isinstance(refused, Reply)
    assert isinstance(refused.error, AdapterUnavailableError)
    service.take(validate(2))
    done = sent.get(timeout=SECONDS)
    assert isinstance(done, Reply)
    assert (refused.call_id, done.call_id) == (1, 2)
    assert done.error is not None
    assert "thread" not in str(done.error)
    assert sent.empty()
