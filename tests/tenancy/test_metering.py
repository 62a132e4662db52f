"""Usage on its way to the journal."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import AdapterUnavailableError, ConfigError, DamagedFileError
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.tenancy import metering
from lora_serve.tenancy.metering import SETTLING, Meter, summed
from lora_serve.tenancy.usage import FIGURES, FILE_NAME, UsageFigures, UsageJournal, UsageKey, UsageRow
from tests.tenancy.limited import Clock

ACME = UsageKey("acme", "acme/a", "1", "sha256:a", "k1")
GLOBEX = UsageKey("globex", "base", "0", "base", "k2")
ONE = UsageFigures(requests=1, prompt_tokens=10, generated_tokens=5, compute_seconds=0.25)
FOREVER = 2**40


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(tmp_path)
    yield journal
    journal.close()


class FailingOnce:
    """A journal whose first answer is lost: it has written the batch and says that it has not."""

    def __init__(self, journal: UsageJournal) -> None:
        self._journal = journal
        self._is_first = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._journal, name)

    def write(self, number: int, batch: dict[tuple[int, UsageKey], UsageFigures]) -> bool:
        written = self._journal.write(number, batch)
        if self._is_first:
            self._is_first = False
            raise AdapterUnavailableError("The answer was lost.")
        return written


def total(rows: list[UsageRow]) -> UsageFigures:
    return summed(rows, lambda bucket, key: ()).get((), UsageFigures())


async def test_what_was_counted_is_there_before_and_after_it_is_written_and_after_a_restart(tmp_path: Path) -> None:
    meter = Meter(UsageJournal(tmp_path))
    meter.record(ACME, ONE)
    meter.record(ACME, ONE)
    assert total((await meter.rows(0, FOREVER))[0]).requests == 2
    await meter.flush()
    meter.record(GLOBEX, ONE)
    assert total((await meter.rows(0, FOREVER))[0]).requests == 3
    await meter.close()
    again = Meter(UsageJournal(tmp_path))
    rows, is_complete = await again.rows(0, FOREVER)
    assert is_complete
    assert summed(rows, lambda bucket, key: (key.tenant,)) == {("acme",): ONE.plus(ONE), ("globex",): ONE}
    await again.close()


class Slow:
    """An exchange whose rows take long."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def publish(self, journal: UsageJournal) -> None:
        pass

    def rows_of_others(self, start: int, end: int, tenant: str | None = None) -> list[UsageRow]:
        self.gate.wait(60)
        return [(0, GLOBEX, ONE)]


async def test_usage_is_written_however_many_ask_for_rows_that_take_long_to_read(journal: UsageJournal) -> None:
    """More than the event loop's executor has threads."""
    exchange = Slow()
    meter = Meter(journal, exchange)  # type: ignore[arg-type]
    meter.record(ACME, ONE)
    reads = [asyncio.create_task(meter.rows(0, FOREVER)) for _ in range(40)]
    try:
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            await meter.flush()
        assert total(journal.rows(0, FOREVER)) == ONE
    finally:
        exchange.gate.set()
    assert {total(rows).requests for rows, _ in await asyncio.gather(*reads)} == {2}


async def test_batch_whose_answer_was_lost_is_counted_once(journal: UsageJournal) -> None:
    meter = Meter(FailingOnce(journal))  # type: ignore[arg-type]
    meter.record(ACME, ONE)
    await meter.flush()
    meter.record(ACME, ONE)
    await meter.flush()
    await meter.flush()
    assert total((await meter.rows(0, FOREVER))[0]) == ONE.plus(ONE)
    assert total(journal.rows(0, FOREVER)) == ONE.plus(ONE)


async def test_usage_that_cannot_be_written_is_kept_until_it_can(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(number: int, batch: object) -> bool:
        raise AdapterUnavailableError("disk full")

    meter = Meter(journal)
    with monkeypatch.context() as patched:
        patched.setattr(journal, "write", fails)
        for _ in range(3):
            meter.record(ACME, ONE)
            await meter.flush()
    assert sum("counted in memory only" in record.message for record in caplog.records) == 1
    assert total((await meter.rows(0, FOREVER))[0]).requests == 3
    await meter.flush()
    await meter.flush()
    assert total(journal.rows(0, FOREVER)).requests == 3


async def test_usage_is_kept_by_the_hour_and_for_so_many_days(journal: UsageJournal) -> None:
    clock = Clock()
    meter = Meter(journal, None, AccountingConfig(usage_bucket_seconds=3600, usage_keep_days=2), clock, uptime=clock)
    first = int(clock.now // 3600) * 3600
    meter.record(ACME, ONE)
    clock.now = first + 3600
    meter.record(ACME, ONE)
    await meter.flush()
    assert [row[0] for row in (await meter.rows(0, FOREVER))[0]] == [first, first + 3600]
    assert len((await meter.rows(first + 1, FOREVER))[0]) == 1
    clock.now += 4 * 86_400
    await meter.flush()
    assert (await meter.rows(0, FOREVER))[0] == []


@pytest.mark.parametrize("jump", [4e9, 30 * 86_400.0, -1.7e9])
async def test_clock_that_jumps_takes_no_usage_with_it(journal: UsageJournal, jump: float) -> None:
    clock, uptime = Clock(), Clock(5.0)
    meter = Meter(journal, None, AccountingConfig(usage_keep_days=2), clock, uptime)
    uptime.now += SETTLING
    meter.record(ACME, ONE)
    await meter.flush()
    clock.now += jump
    meter.record(ACME, ONE)
    await meter.flush()
    assert total((await meter.rows(0, FOREVER))[0]).requests == 2


@pytest.mark.parametrize("wrong", [4e9, 30 * 86_400.0, -1.7e9])
async def test_clock_that_is_set_after_the_start_takes_no_usage_with_it(journal: UsageJournal, wrong: float) -> None:
    clock, uptime = Clock(), Clock(5.0)
    journal.write(1, {(int(clock.now), ACME): ONE})
    clock.now += wrong
    meter = Meter(journal, None, AccountingConfig(usage_keep_days=2), clock, uptime)
    await meter.flush()
    clock.now -= wrong
    uptime.now += SETTLING
    await meter.flush()
    assert total((await meter.rows(0, FOREVER))[0]).requests == 1
    for moved in (clock, uptime):
        moved.now += 3 * 86_400
    await meter.flush()
    assert (await meter.rows(0, FOREVER))[0] == [], "and it is forgotten in its time"


def test_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path)
    journal._database.execute("PRAGMA user_version = 99")
    journal.close()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="newer"):
        UsageJournal(tmp_path)


@pytest.mark.parametrize("junk", ["'x'", "x'ff'", "CAST(x'ff' AS TEXT)", "-1", "9e999"])
@pytest.mark.parametrize("column", ["bucket", "requests", "compute_seconds", "digest"])
async def test_row_that_cannot_be_read_is_named_and_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, junk: str
) -> None:
    journal = UsageJournal(tmp_path)
    journal.write(1, {(3600, replace(ACME, tenant=name)): UsageFigures(1) for name in ("a", "b")})
    journal._database.execute(f"UPDATE usage SET {column} = {junk} WHERE tenant = 'a'")
    journal.close()
    journal = UsageJournal(tmp_path)
    is_text = column == "digest" and junk != "x'ff'"
    assert [key.tenant for _, key, _ in journal.rows(0, 2**40)] == (["a", "b"] if is_text else ["b"])
    assert [key.tenant for _, key, _ in journal.unpublished()] == (["a", "b"] if is_text else ["b"])
    assert ("rows that cannot be read are in no sum" in caplog.text) is not is_text
    journal.close()


@pytest.mark.parametrize("junk", [None, "x"])
def test_file_whose_last_batch_has_no_number_is_damaged(tmp_path: Path, junk: str | None) -> None:
    """Whoever took another number would count a batch twice, or not at all."""
    journal = UsageJournal(tmp_path)
    journal._database.execute("UPDATE last_batch SET number = 'x'" if junk else "DELETE FROM last_batch")
    journal.close()
    with pytest.raises(DamagedFileError, match=r"usage\.sqlite3.*is damaged"):
        UsageJournal(tmp_path)


figures = st.builds(UsageFigures, *(st.integers(0, 2**40) for _ in FIGURES))
keys = st.builds(UsageKey, *(st.text(max_size=3) for _ in range(5)))


@given(st.lists(st.tuples(keys, figures), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_sums_are_those_of_the_parts_whatever_batches_they_came_in(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[UsageKey, UsageFigures]], cuts: list[int]
) -> None:
    journal, left = UsageJournal(tmp_path_factory.mktemp("usage")), list(parts)
    for number, cut in enumerate([*cuts, len(parts)], 1):
        batch: dict[tuple[int, UsageKey], UsageFigures] = {}
        for key, one in left[:cut]:
            batch[0, key] = batch.get((0, key), UsageFigures()).plus(one)
        left = left[cut:]
        assert journal.write(number, batch)
        assert not journal.write(number, batch), "a number is written once"
    expected = total([(0, key, one) for key, one in parts])
    assert astuple(total(journal.rows(0, FOREVER))) == pytest.approx(astuple(expected))
    journal.close()


async def test_usage_that_cannot_be_written_for_long_is_added_up_and_none_is_lost(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "MAX_PENDING", 50)
    clock = Clock(1_800_000_000.0)
    meter = Meter(journal, clock=clock)
    for number in range(2000):
        clock.now += 200
        key = UsageKey(
            f"tenant-{number % 4}", f"a{number % 3}", str(number % 5), f"sha256:{number % 5}", f"k{number % 7}"
        )
        meter.record(key, ONE)
        assert len(meter._pending) <= 51
    rows, _ = await meter.rows(0, FOREVER)
    sums = summed(rows, lambda bucket, key: (key.tenant,))
    assert {name: figures.requests for name, figures in sums.items()} == {(f"tenant-{n}",): 500 for n in range(4)}
    await meter.flush()
    assert total((await meter.rows(0, FOREVER))[0]).requests == 2000
    await meter.close()
