"""Point 17: whoever gives up waiting for Redis leaves no reply behind for the next one to read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.journals.redis import RedisJournal
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME
from lora_serve.adapters.stores.redis import RedisStore
from lora_serve.core.errors import AdapterUnavailableError
from tests.redis_server import RedisServer

DIGESTS = {letter: "sha256:" + letter * 64 for letter in "abcdef"}
TIMEOUT = 1.0  # seconds per reply


@pytest.fixture
def store(own_redis: RedisServer, tmp_path: Path) -> Iterator[RedisStore]:
    """With an adapter per letter, whose files say which it is."""
    with closing(RedisStore(own_redis.url, timeout=TIMEOUT)) as store:
        for letter, digest in DIGESTS.items():
            folder = tmp_path / letter
            folder.mkdir()
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                (folder / name).write_text(f"{name} of {letter}")
            store.put(digest, folder)
        yield store


def content(store: RedisStore, letter: str) -> set[str]:
    with store.open(DIGESTS[letter]) as folder:
        return {path.read_text() for path in folder.iterdir()}


def expected(letter: str) -> set[str]:
    return {f"{name} of {letter}" for name in (CONFIG_NAME, WEIGHTS_NAME)}


async def test_readers_that_give_up_cross_no_replies(store: RedisStore, own_redis: RedisServer) -> None:
    for _ in range(3):
        own_redis.pause()
        tasks = [asyncio.create_task(asyncio.to_thread(content, store, letter)) for letter in DIGESTS]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, AdapterUnavailableError | asyncio.CancelledError)
        own_redis.resume()  # the replies that nobody waited for come now, if their connections are still there
        found = await asyncio.gather(*(asyncio.to_thread(content, store, letter) for letter in DIGESTS))
        assert found == [expected(letter) for letter in DIGESTS]


async def test_readers_cancelled_while_replies_flow_cross_none(store: RedisStore) -> None:
    for _ in range(30):
        tasks = [asyncio.create_task(asyncio.to_thread(content, store, letter)) for letter in DIGESTS]
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        for letter, task in zip(DIGESTS, tasks, strict=True):
            if task in done:
                assert task.result() == expected(letter)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    assert [content(store, letter) for letter in DIGESTS] == [expected(letter) for letter in DIGESTS]


def test_journal_after_a_timeout_reads_its_own_replies(own_redis: RedisServer) -> None:
    with closing(RedisJournal(own_redis.url, timeout=TIMEOUT)) as journal:
        position = journal.load().position
        for number in range(3):
            position = journal.commit(position, {f"key-{number}": f"text-{number}"})
            assert position is not None
            own_redis.pause()
            with pytest.raises(AdapterUnavailableError):
                journal.load()
            own_redis.resume()
            page = journal.load()
            assert page.position == position
            assert page.records == {f"key-{index}": f"text-{index}" for index in range(number + 1)}
