"""The audit log: appended, chained, shared."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.tenancy.audit_journal import Act, AuditJournal, AuditLine
from lora_serve.tenancy.audit_log import AuditLog, RefusedActs
from lora_serve.tenancy.shared import AuditExchange
from tests.redis_server import RedisServer
from tests.tenancy.limited import Clock
from tests.tiers import mostly_nightly

JUNK = ("CAST(x'ff' AS TEXT)", "7", "'{'", "x'ff'", "'[1]'", "-1", "1e300")
ACT = Act("k1", "acme", "tenant-admin", "DELETE /admin/adapters/{id}", "acme/a", "acme", "sha256:a", 200, "r1")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[AuditJournal]:
    journal = AuditJournal(tmp_path, "replica")
    yield journal
    journal.close()


def everything(line: AuditLine) -> bool:
    return True


async def subjects(log: AuditLog, limit: int = 100, before: str | None = None) -> list[str]:
    return [line.act["subject"] for line in (await log.page(limit, before, everything)).lines]


def test_lines_follow_from_one_another_over_a_restart(tmp_path: Path) -> None:
    for number in range(3):
        journal = AuditJournal(tmp_path, "replica")
        assert journal.append(replace(ACT, subject=f"acme/{number}")).number == number + 1
        assert not list(journal.broken())
        journal.close()
    assert (tmp_path / "audit.sqlite3").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ("DELETE FROM audit WHERE number = 2", [3]),
        ("DELETE FROM audit WHERE number = 1", [2]),
        ("UPDATE audit SET line = replace(line, 'acme', 'evil') WHERE number = 2", [2]),
        ("UPDATE audit SET number = 7 WHERE number = 2", [3, 7]),
        ("UPDATE audit SET number = 9 WHERE number = 3", [4, 9]),
        ("UPDATE audit SET line = '{' WHERE number IN (1, 4)", [1, 4]),
    ],
)
def test_line_that_was_removed_changed_or_moved_shows(journal: AuditJournal, change: str, broken: list[int]) -> None:
    for _ in range(4):
        journal.append(ACT)
    assert not list(journal.broken())
    journal._database.execute(change)
    assert list(journal.broken()) == broken


@pytest.mark.parametrize("column", ["line", "time_ms", "digest", "all"])
@pytest.mark.parametrize("junk", mostly_nightly(JUNK, *JUNK[:2]))
@pytest.mark.parametrize("number", mostly_nightly((3, 1), 3))
async def test_line_that_cannot_be_read_is_named_and_holds_up_no_other(
    journal: AuditJournal, redis_url: str, column: str, junk: str, number: int
) -> None:
    for name in "abc":
        journal.append(replace(ACT, subject=name))
    columns = ("line", "time_ms", "digest") if column == "all" else (column,)
    changes = ", ".join(f"{name} = {junk}" for name in columns)
    journal._database.execute(f"UPDATE audit SET {changes} WHERE number = {number}")
    journal.append(replace(ACT, subject="d"))
    is_named = column != "time_ms" or junk == "7"  # another time that is none is the line's own again
    assert list(journal.broken())[:1] == ([number] if is_named else [])
    names = ["a", "b", "c", "d"]
    if column in ("line", "all"):
        names[number - 1] = ""
    log = AuditLog(journal)
    assert {line.number: line.act["subject"] for line in (await log.page(9, None, everything)).lines} == dict(
        enumerate(names, 1)
    )
    unreadable = (await log.page(9, None, lambda line: line.act["action"] == "unreadable")).lines
    assert [line.number for line in unreadable] == ([] if names[number - 1] else [number])
    exchange, other = (AuditExchange(redis_url, f"{column}{junk}{number}", name) for name in ("replica", "other"))
    for _ in range(2):
        exchange.publish(journal)
    found = [line.act["subject"] for line in other.latest_of_others(9, None, everything)]
    if (column, junk) == ("time_ms", "7"):
        names[number - 1] = ""
    assert found == [name for name in reversed(names) if name]
    exchange.close()
    other.close()


def test_times_never_go_back_even_if_the_clock_does(tmp_path: Path) -> None:
    clock = Clock()
    journal = AuditJournal(tmp_path, "replica", clock)
    first = journal.append(ACT)
    clock.now -= 3600
    second = journal.append(ACT)
    assert second.time_ms == first.time_ms
    assert second.id > first.id
    journal.close()


async def test_pages_are_newest_first_and_end(journal: AuditJournal) -> None:
    log = AuditLog(journal)
    for number in range(5):
        await log.append(replace(ACT, subject=str(number)))
    page = await log.page(2, None, everything)
    assert [line.act["subject"] for line in page.lines] == ["4", "3"]
    assert page.has_more
    assert await subjects(log, 2, page.lines[-1].id) == ["2", "1"]
    last = await log.page(2, (await log.page(4, None, everything)).lines[-1].id, everything)
    assert [line.act["subject"] for line in last.lines] == ["0"]
    assert not last.has_more


async def test_page_far_down_reads_none_of_the_lines_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    journal, read = AuditJournal(tmp_path, "replica", clock), list[AuditLine]()
    for number in range(30):
        journal.append(replace(ACT, subject=f"acme/{number}"))
        clock.now += 0.01 * (number % 3)  # some in the same millisecond
    latest = journal.latest

    def watched(before: int | None = None, limit: int = 1000) -> list[AuditLine]:
        read.extend(found := latest(before, limit))
        return found

    monkeypatch.setattr(journal, "latest", watched)
    log, before = AuditLog(journal), None
    found: list[str] = []
    while len(found) < 30:
        page = await log.page(5, before, everything)
        before = page.lines[-1].id
        found += [line.act["subject"] for line in page.lines]
    assert found == [f"acme/{number}" for number in reversed(range(30))]
    read.clear()
    assert len((await log.page(5, before, everything)).lines) == 0
    assert len(read) <= 3  # those of the last page's last millisecond
    await log.close()


async def test_acts_are_noted_however_many_look_at_a_log_that_takes_long_to_read(
    journal: AuditJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the event loop's executor has threads, also of callers that leave while they wait."""
    log, gate, begun, latest = AuditLog(journal), threading.Event(), list[int](), journal.latest
    await log.append(ACT)

    def slow(before: int | None = None, limit: int = 1000) -> list[AuditLine]:
        begun.append(1)
        gate.wait(60)
        return latest(before, limit)

    monkeypatch.setattr(journal, "latest", slow)
    try:
        leaving = [asyncio.create_task(log.page(9, None, everything)) for _ in range(40)]
        await asyncio.sleep(0.05)
        for look in leaving:
            look.cancel()
        await asyncio.wait(leaving)
        looks = [asyncio.create_task(log.page(9, None, everything)) for _ in range(40)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            await log.append(ACT)
        assert len(begun) <= 2, "those that left before their turn are not begun"
    finally:
        gate.set()
    assert {len(page.lines) for page in await asyncio.gather(*looks)} == {2}


async def test_only_lines_that_match_are_in_a_page(journal: AuditJournal) -> None:
    log = AuditLog(journal)
    for number in range(6):
        await log.append(replace(ACT, subject=str(number), owner="acme" if number % 2 else "globex"))
    page = await log.page(2, None, lambda line: line.act["owner"] == "globex")
    assert [line.act["subject"] for line in page.lines] == ["4", "2"]
    assert page.has_more


async def test_tenant_that_is_refused_again_and_again_does_not_fill_the_log(journal: AuditJournal) -> None:
    clock = Clock()
    log = AuditLog(journal, refused=RefusedActs(clock))
    refused = [replace(ACT, outcome=404), replace(ACT, role="inference", outcome=403), replace(ACT, outcome=403)]
    for number in range(60 + 30):
        await log.append(refused[number % 3])
    assert len(journal.lines()) == 60
    others = [ACT, replace(ACT, outcome=499), replace(ACT, outcome=503), replace(ACT, role="admin", outcome=404)]
    for act in (*others, replace(refused[0], tenant="globex")):
        await log.append(act)
    assert len(journal.lines()) == 60 + 5, "what did something, an admin's and another tenant's are noted"
    clock.now += 60
    await log.append(refused[0])
    assert len(journal.lines()) == 60 + 6


async def test_admin_that_is_told_to_come_less_often_does_not_fill_the_log(journal: AuditJournal) -> None:
    log = AuditLog(journal, refused=RefusedActs(Clock()))
    for _ in range(60 + 30):
        await log.append(replace(ACT, role="admin", outcome=429))
    assert len(journal.lines()) == 60


async def test_act_that_cannot_be_noted_is_an_error(journal: AuditJournal) -> None:
    journal._database.execute("PRAGMA query_only = ON")
    with pytest.raises(AdapterUnavailableError):
        await AuditLog(journal).append(ACT)


def log_of(url: str, store: Path, name: str) -> AuditLog:
    return AuditLog(AuditJournal(store / name, name), AuditExchange(url, "t", name, timeout=20))


async def published(log: AuditLog) -> None:
    while log._publishing is not None and not log._publishing.done():
        await log._publishing


async def test_every_replica_shows_the_acts_of_all_once(redis_url: str, tmp_path: Path) -> None:
    here, there = log_of(redis_url, tmp_path, "here"), log_of(redis_url, tmp_path, "there")
    for number in range(3):
        for log, name in ((here, "here"), (there, "there")):
            await log.append(replace(ACT, subject=f"{name}-{number}"))
            await published(log)
            log.publish()  # again: nothing new
            await published(log)
    assert sorted(await subjects(here)) == sorted(f"{name}-{n}" for name in ("here", "there") for n in range(3))
    assert await subjects(here) == await subjects(there)
    for log in (here, there):
        await log.close()


def test_lines_that_gathered_are_sent_once_each(
    redis_url: str, shared_redis: RedisServer, journal: AuditJournal
) -> None:
    for _ in range(20):
        journal.append(ACT)
    with shared_redis.client() as client, closing(AuditExchange(redis_url, "t", "replica", timeout=20)) as exchange:
        client.config_resetstat()
        exchange.publish(journal)
        assert client.info("commandstats")["cmdstat_xadd"]["calls"] == 20


async def test_tenants_acts_at_another_replica_are_found_however_many_acts_of_others_came_since(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.tenancy.shared._PAGE", 2)
    here, there = log_of(redis_url, tmp_path, "here"), log_of(redis_url, tmp_path, "there")
    for number, owner in enumerate(["acme", "globex", "acme", "globex", "globex", "globex"]):
        await there.append(replace(ACT, subject=str(number), owner=owner))
        await published(there)
    first = await here.page(1, None, lambda line: line.act["owner"] == "acme")
    assert ([line.act["subject"] for line in first.lines], first.has_more) == (["2"], True)
    last = await here.page(1, first.lines[0].id, lambda line: line.act["owner"] == "acme")
    assert ([line.act["subject"] for line in last.lines], last.has_more) == (["0"], False)
    for log in (here, there):
        await log.close()


async def test_acts_while_redis_was_away_are_shown_later(own_redis: RedisServer, tmp_path: Path) -> None:
    here, there = log_of(own_redis.url, tmp_path, "here"), log_of(own_redis.url, tmp_path, "there")
    own_redis.kill()
    await here.append(replace(ACT, subject="alone"))
    await published(here)
    page = await there.page(10, None, everything)
    assert (page.lines, page.is_complete) == ([], False)
    own_redis.start()
    await here.append(replace(ACT, subject="back"))
    await published(here)
    assert await subjects(there) == ["back", "alone"]
    for log in (here, there):
        await log.close()


def _wrong(client: redis.Redis, key: str) -> None:
    client.delete(key)
    client.lpush(key, "junk")


def _taken_and_gone(client: redis.Redis, key: str) -> None:
    client.xadd(key, {"x": "junk"}, id=MAX_ID)
    client.xdel(key, MAX_ID)


MAX_ID = "18446744073709551615-18446744073709551615"
JUNK: dict[str, Callable[[redis.Redis, str], object]] = {
    "id_of_now": lambda client, key: client.xadd(key, {"x": "junk"}),
    "highest_id": lambda client, key: client.xadd(key, {"x": "junk"}, id=MAX_ID),
    "highest_id_that_is_gone_again": _taken_and_gone,
    "no_act": lambda client, key: client.xadd(key, {"line": "[]", "digest": "x"}),
    "another_type": _wrong,
    "gone": lambda client, key: client.delete(key),
}


@pytest.mark.parametrize("name", JUNK)
async def test_junk_among_the_shared_lines_hides_none(
    redis_url: str, shared_redis: RedisServer, tmp_path: Path, name: str
) -> None:
    here, there = log_of(redis_url, tmp_path, "here"), log_of(redis_url, tmp_path, "there")
    await here.append(replace(ACT, subject="1"))
    await published(here)
    assert await subjects(there) == ["1"]
    with shared_redis.client() as client:
        JUNK[name](client, "t:audit:here")
        if name == "another_type":
            _wrong(client, "t:audit:replicas")
    if name not in ("gone", "another_type"):
        assert await subjects(there) == ["1"], "what is no line is left out"
    for subject in "23":
        await here.append(replace(ACT, subject=subject))
    await published(here)
    assert await subjects(there) == ["3", "2", "1"]
    for log in (here, there):
        await log.close()


async def test_line_that_this_server_has_no_more_stays_in_redis(
    redis_url: str, shared_redis: RedisServer, tmp_path: Path
) -> None:
    """Whoever cuts the end off the file does not have it cut off there too."""
    here = log_of(redis_url, tmp_path, "here")
    for subject in "123":
        await here.append(replace(ACT, subject=subject))
    await here.close()
    with closing(sqlite3.connect(tmp_path / "here" / "audit.sqlite3")) as database:
        database.execute("DELETE FROM audit WHERE number > 1")
        database.commit()
    again = log_of(redis_url, tmp_path, "here")
    again.publish()
    await again.append(replace(ACT, subject="other"))
    await again.close()
    with shared_redis.client() as client:
        lines = [json.loads(fields[b"line"])["subject"] for _, fields in client.xrange("t:audit:here")]
    assert lines[:3] == ["1", "2", "3"]
