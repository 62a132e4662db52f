"""The follower's thread alone: what it calls when, and that nothing ends it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from threading import Event

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.ledger import Follower
from lora_serve.core.errors import AdapterUnavailableError
from tests.catalog_versions import version

PATIENCE = 30.0  # seconds, of a test that fails
NOBODY_CLOSES = """
from types import SimpleNamespace
from threading import Event
from lora_serve.adapters.catalog.ledger import Follower
journal, read = Event(), Event()
Follower(SimpleNamespace(is_away=False, num_losses=0, wait=journal.wait, refresh=read.set), lambda: None).start()
assert read.wait(30)
"""


class Turns(Event):
    """The follower's own event, which ends it after so many pauses or refusals to pause."""

    def __init__(self, num_pauses: int) -> None:
        super().__init__()
        self.left = num_pauses

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        if not self.left:
            self.set()
        return False


def failing(error: Exception, num_times: int, then: Callable[[], None]) -> Callable[[], None]:
    """A function that raises so many times before it does something."""
    errors = iter([error] * num_times)

    def act() -> None:
        if (one := next(errors, None)) is not None:
            raise one
        then()

    return act


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), AdapterUnavailableError("away")])
def test_what_follows_a_return_is_done_again_until_it_succeeds_and_then_no_more(
    catalog: Catalog, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    done, heard, calls = Event(), Event(), list[int]()

    def note() -> None:
        calls.append(1)
        done.set()

    with closing(Follower(catalog.ledger, failing(error, 2, note))) as follower:
        follower.start()
        assert done.wait(PATIENCE)
        catalog.ledger.listen(heard.set)
        Registration(id="a").commit(catalog.ledger, version("a"))
        assert heard.wait(PATIENCE)
    assert len(calls) == 1
    bugs = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(bugs) == (2 if isinstance(error, OSError) else 0)


def test_while_the_journal_is_away_it_is_asked_with_pauses_and_nothing_is_returned(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def away(*_: object) -> None:
        asked.append(1)
        raise AdapterUnavailableError("away")

    def returned() -> None:
        pytest.fail("it is not back")

    monkeypatch.setattr(catalog.ledger.journal, "load", away)
    monkeypatch.setattr(catalog.ledger.journal, "since", away)
    follower = Follower(catalog.ledger, returned)
    follower._stopping = turns = Turns(3)
    follower.start()
    follower._thread.join(PATIENCE)
    assert (len(asked), turns.left) == (3, 0)


def test_follower_that_nobody_closes_keeps_no_process_alive() -> None:
    subprocess.run([sys.executable, "-c", NOBODY_CLOSES], check=True, timeout=PATIENCE)
