"""Work waits for threads that are there where no more can be started."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from lora_serve.core.process import PatientThreads

NO_THREAD = RuntimeError("can't start new thread")


def test_work_waits_for_the_threads_that_are_there() -> None:
    held = threading.Event()
    with PatientThreads(4) as threads:
        first = threads.submit(held.wait)
        with mock.patch.object(threading.Thread, "start", side_effect=NO_THREAD):
            second = threads.submit(lambda: 7)
        assert not second.done()
        held.set()
        assert (first.result(10), second.result(10)) == (True, 7)


@mock.patch.object(threading.Thread, "start", side_effect=NO_THREAD)
def test_work_is_refused_while_there_is_no_thread_at_all(start: mock.Mock) -> None:
    with PatientThreads(4) as threads, pytest.raises(RuntimeError, match="new thread"):
        threads.submit(lambda: 7)
